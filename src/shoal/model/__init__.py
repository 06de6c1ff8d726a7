"""transformers' modules as the worker runs them."""
