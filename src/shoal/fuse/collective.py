"""Sums over ranks as jobs among others: one participant talks to the other ranks. Knows no layer.

Their words: rows, width, address of rows [rows, width] float32, the state of :mod:`shoal.comm.shm_kernels`, a
channel. Their statuses are that module's.
"""

from __future__ import annotations

from shoal.comm.shm_kernels import all_reduce, collect, post
from shoal.comm.shm_sums import FLOAT32
from shoal.cpu_kernels.arguments import argument
from shoal.jit.compile import kernel

__all__ = ["collect_job", "post_job", "sum_job"]


@kernel(fastmath=False)
def sum_job(index: int, count: int, words: int) -> int:
    """Replace the rows by their sums over ranks, whatever the channel."""
    if index != 0:
        return 0
    numbers = argument(words, 0) * argument(words, 1)
    status: int = all_reduce(argument(words, 3), argument(words, 2), numbers, FLOAT32)
    return status


@kernel(fastmath=False)
def post_job(index: int, count: int, words: int) -> int:
    """Tell the other ranks the rows, which must fit a slot, and wait for nobody."""
    if index != 0:
        return 0
    numbers = argument(words, 0) * argument(words, 1)
    status: int = post(argument(words, 3), argument(words, 4), argument(words, 2), numbers, FLOAT32)
    return status


@kernel(fastmath=False)
def collect_job(index: int, count: int, words: int) -> int:
    """Replace the rows, which were posted, by their sums over ranks."""
    if index != 0:
        return 0
    numbers = argument(words, 0) * argument(words, 1)
    status: int = collect(argument(words, 3), argument(words, 4), argument(words, 2), numbers, FLOAT32)
    return status
