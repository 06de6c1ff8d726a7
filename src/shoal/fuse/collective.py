"""A sum over ranks as a job among others: one participant talks to the other ranks. Knows no layer."""

from __future__ import annotations

from shoal.comm.shm_kernels import all_reduce
from shoal.comm.shm_sums import FLOAT32
from shoal.cpu_kernels.arguments import argument
from shoal.jit.compile import kernel

__all__ = ["sum_job"]


@kernel(fastmath=False)
def sum_job(index: int, count: int, words: int) -> int:
    """Replace rows [rows, width] float32 by their sums over ranks.

    Its words: rows, width, address, the state of :mod:`shoal.comm.shm_kernels`. The status is theirs.
    """
    if index != 0:
        return 0
    status: int = all_reduce(
        argument(words, 3), argument(words, 2), argument(words, 0) * argument(words, 1), FLOAT32
    )
    return status
