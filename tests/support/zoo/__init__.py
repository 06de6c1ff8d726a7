"""Tiny random models, one per family: what is supported is shown on these."""
