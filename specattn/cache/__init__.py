"""KV pools and the slot tables that map tokens to their slots."""
