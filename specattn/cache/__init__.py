"""KV pools, and the tables that say which slots a request's tokens have."""
