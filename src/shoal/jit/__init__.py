"""Compiling kernels with numba and running them on a team of threads. Imported only where kernels run."""
