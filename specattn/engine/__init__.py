"""Batched generation: waiting and running requests, admission, and speculative configs."""
