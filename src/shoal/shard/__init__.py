"""A plan made into modules."""
