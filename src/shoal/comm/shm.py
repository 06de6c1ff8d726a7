"""Collectives over memory that the ranks of one host share. Imports numba: import it where it is used.

Knows no model. What travels and how is :mod:`.shm_kernels`; here tensors become addresses, and statuses
errors.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import numpy
import torch
from numba import types

from shoal.comm import shm_kernels as kernels
from shoal.comm.shm_segment import Segment, watch_process
from shoal.comm.shm_sums import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT32, INT64
from shoal.errors import RankError
from shoal.jit.cache import compiling
from shoal.jit.waiting import ABANDONED, LATE, OK

__all__ = ["MOST_RANKS", "SLOT_BYTES", "ShmComm", "compile_kernels", "segment_bytes"]

MOST_RANKS = kernels.MOST_RANKS
# The most that a post holds: 1,024 rows of 4,096 float32. Memory is taken by what is posted.
SLOT_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 256 * 1024  # what is larger goes in pieces, which stay in the processors' caches
_SPIN_NS = 50_000  # about what it takes to wake a sleeper

_ENTRIES = (  # kernels called from here, and how many integers they take
    (kernels.all_reduce, 4),
    (kernels.all_gather, 5),
    (kernels.broadcast, 4),
    (kernels.barrier, 1),
    (kernels.abandon, 2),
    (kernels.first_to_leave, 1),
)

_KINDS = {
    torch.float32: FLOAT32,
    torch.float64: FLOAT64,
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
    torch.int32: INT32,
    torch.int64: INT64,
}


def segment_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Bytes that ``size`` ranks share."""
    return kernels.segment_bytes(size, slot_bytes)


def compile_kernels() -> None:
    """Compile what collectives run, or read it from disk, so that no first call keeps the peers waiting."""
    with compiling():
        for kernel, arguments in _ENTRIES:
            compiled: Any = kernel
            compiled.compile((types.int64,) * arguments)


class ShmComm:
    """One rank's end of a group. See :class:`shoal.comm.base.Comm`.

    Args:
        segment: the memory shared, of :func:`segment_bytes`.
        processes: the ranks' process ids; a peer whose process has ended is noticed within 50 ms.
        timeout_s: how long a collective waits for its peers.
        has_core: whether each rank can have a core of its own; else waiting ranks sleep at once.
        slot_bytes: the most that :func:`.shm_kernels.post` takes.
    """

    def __init__(
        self,
        rank: int,
        segment: Segment,
        processes: Sequence[int],
        timeout_s: float,
        has_core: bool = True,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self.rank = rank
        self.size = len(processes)
        self.slot_bytes = slot_bytes
        self._segment: Segment | None = segment
        self._failure = ""
        self._state = numpy.zeros(kernels.STATE_WORDS, numpy.int64)
        self._widths = numpy.zeros(self.size, numpy.int64)
        self._state_address = int(self._state.ctypes.data)
        self._widths_address = int(self._widths.ctypes.data)
        watches = [-1 if peer == rank else watch_process(pid) for peer, pid in enumerate(processes)]
        self._finalizer = weakref.finalize(self, _close_files, watches)
        for peer, watch in enumerate(watches):  # struct pollfd: a file (negative: none), then POLLIN
            self._state[kernels.WATCHED + peer] = (watch & 0xFFFFFFFF) | (1 << 32)
        self._state[kernels.SEGMENT] = segment.address
        self._state[kernels.RANK] = rank
        self._state[kernels.SIZE] = self.size
        self._state[kernels.SLOT_BYTES] = slot_bytes
        self._state[kernels.PIECE_BYTES] = min(_PIECE_BYTES, slot_bytes)
        self._state[kernels.SPIN_NS] = _SPIN_NS if has_core else 0
        self.set_timeout(timeout_s)

    @property
    def state_address(self) -> int:
        """For kernels that call :mod:`.shm_kernels` themselves; what they return goes to :meth:`check`."""
        return self._state_address

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_cpu, "memory is shared between CPUs"
        kind = _KINDS.get(tensor.dtype)
        if kind is None:
            everyone = self.all_gather(tensor[None], [1] * self.size, 0)
            return reduce(torch.add, everyone.unbind(0))
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        self._run("all_reduce", kernels.all_reduce, tensor.data_ptr(), tensor.numel(), kind)
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        assert tensor.is_cpu, "memory is shared between CPUs"
        if tensor.shape[dim] != sizes[self.rank]:
            raise RankError(
                f"all_gather: rank {self.rank} brings {tensor.shape[dim]} along dimension {dim}, "
                f"promised were {list(sizes)}",
                self.rank,
            )
        dim %= tensor.dim()
        shape = tensor.shape
        rows, inner_bytes = prod(shape[:dim]), prod(shape[dim + 1 :]) * tensor.itemsize
        result = tensor.new_empty([*shape[:dim], sum(sizes), *shape[dim + 1 :]])
        if result.numel() == 0:
            return result
        mine = tensor.contiguous()
        self._widths[:] = sizes
        self._widths *= inner_bytes
        addresses = mine.data_ptr(), result.data_ptr()
        self._run("all_gather", kernels.all_gather, *addresses, rows, self._widths_address)
        return result

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        assert tensor.is_cpu, "memory is shared between CPUs"
        tensor = tensor.contiguous()
        self._run("broadcast", kernels.broadcast, tensor.data_ptr(), tensor.nbytes, source)
        return tensor

    def barrier(self) -> None:
        self._run("barrier", kernels.barrier)

    def set_timeout(self, timeout_s: float) -> None:
        """How long collectives wait for their peers from now on."""
        self._timeout_s = timeout_s
        self._state[kernels.TIMEOUT_NS] = min(int(timeout_s * 1e9), 2**62)

    def close(self) -> None:
        """Leave the group; peers that wait in a collective are released with an error."""
        if self._segment is not None:
            kernels.abandon(self._state_address, self.rank)
            self._segment = None

    def check(self, status: int, collective: str) -> None:
        """Raise for a status that is not OK; the group is then of no more use, to nobody.

        Raises:
            RankError: a peer has died, is late, has left, or is in another collective.
        """
        if status == OK:
            return
        culprit = int(self._state[kernels.CULPRIT])
        if status == ABANDONED:
            culprit = int(kernels.first_to_leave(self._state_address))
        said = {
            LATE: f"rank {culprit} did not come within {self._timeout_s:g} s",
            ABANDONED: f"rank {culprit} has left the group, or failed",
            kernels.GONE: f"rank {culprit} has died",
            kernels.DIFFERENT: f"rank {culprit} is in another collective, or brings another size",
        }
        self._failure = f"{collective}: {said[status]}"
        kernels.abandon(self._state_address, culprit)
        raise RankError(self._failure, culprit)

    def _run(self, collective: str, kernel: Callable[..., int], *arguments: int) -> None:
        segment = self._segment  # mapped until this returns, even if another thread closes the group
        if segment is None:
            raise RankError("the group of ranks is closed", self.rank)
        if self._failure:
            raise RankError(f"the group of ranks is of no more use: {self._failure}", self.rank)
        status = kernel(self._state_address, *arguments)
        if status != OK:
            self.check(status, collective)


def _close_files(files: Sequence[int]) -> None:
    for file in files:
        if file >= 0:
            os.close(file)
