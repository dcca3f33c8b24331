"""Absorbed multi-head latent attention: trees, index lists and prompts."""
