"""Measuring. A benchmark's result is plain rows; what is printed of them is the command line's matter."""
