"""Attention over paged KV caches, and which kernel does it."""
