"""Kernels for inference on a CPU, compiled by numba at first use. Import its files, not the package."""
