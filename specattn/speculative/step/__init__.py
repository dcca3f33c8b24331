"""One step: its phases, buffers, graphs and launches."""
