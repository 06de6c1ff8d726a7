"""KV blocks as integers: who holds which, and what can be reused."""
