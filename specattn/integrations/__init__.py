"""Plug-ins for inference engines; none yet."""
