"""Attention over paged keys and values: trees, index lists and prompts."""
