"""Memory in huge pages, where the system has them. Knows nothing of what is kept there.

What is read from end to end needs a look into the page tables every 4 KiB; in huge pages (2 MiB) hardly ever.
Linux gives them to memory that asks (`madvise(MADV_HUGEPAGE)`, Documentation/admin-guide/mm/transhuge.rst).
"""

from __future__ import annotations

import mmap

import torch

__all__ = ["LINE_BYTES", "HugeRegion", "room"]

LINE_BYTES = 64


def room(num_bytes: int) -> int:
    """Bytes that a tensor takes in a region: whole cache lines."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


class HugeRegion:
    """Memory that tensors are cut from, one after the other. It goes with the last of them.

    Args:
        num_bytes: the sum of :func:`room` of all of them; at least 1.
    """

    def __init__(self, num_bytes: int) -> None:
        # Private: shared memory is given huge pages only where an administrator has allowed it.
        self._memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._start = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor, zero, on a cache line of its own.

        Raises:
            ValueError: there is no room left.
        """
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._start)
        self._start += room(tensor.nbytes)
        return tensor.view(shape)
