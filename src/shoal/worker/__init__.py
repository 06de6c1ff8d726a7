"""Ranks: one process each (or inline), and the executor that drives them."""
