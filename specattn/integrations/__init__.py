"""This library inside other engines."""
