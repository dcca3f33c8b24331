"""Prompts: what they must be, and both models over them."""
