"""Memory that is reserved, and given its pages by and by. Knows nothing of what is kept there.

A page is made when it is first touched: seconds for gigabytes, which nobody should wait for at a start, nor
in the middle of a request. Linux makes pages without writing to them (`madvise(MADV_POPULATE_WRITE)`, since
5.14, man 2 madvise), so a thread can while they are in use.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import sys
import threading

import torch

__all__ = ["Backing"]

_log = logging.getLogger("shoal.device")

_MADV_POPULATE_WRITE = 23
_CHUNK_BYTES = 2 << 20  # of a call: a huge page
_LEAST_PRIORITY = 19


class Backing:
    """Tensors whose memory is given its pages from their first rows to their last, all of them side by side.

    One that is made here has to be started, and stopped before its tensors may go.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._tensors: list[torch.Tensor] = []
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="backing", daemon=True)

    @staticmethod
    def is_possible() -> bool:
        """Whether this system can."""
        if sys.platform != "linux":
            return False
        with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            start = torch.frombuffer(page, dtype=torch.uint8).data_ptr()
            return _populate(start, start + mmap.PAGESIZE) == 0

    def add(self, tensor: torch.Tensor) -> None:
        """One more, contiguous."""
        self._tensors.append(tensor)
        self.num_bytes += tensor.nbytes

    def start(self) -> None:
        """Begin, and return at once."""
        self._thread.start()

    def stop(self) -> None:
        """End it, done or not."""
        self._is_wanted = False
        if self._thread.ident is not None:
            self._thread.join()
        self._tensors.clear()

    def wait(self) -> None:
        """Until all is done."""
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        chunks = max((-(-tensor.nbytes // _CHUNK_BYTES) for tensor in self._tensors), default=0)
        for chunk in range(chunks):
            for tensor in self._tensors:
                if not self._is_wanted:
                    return
                start, size = tensor.data_ptr(), tensor.nbytes
                error = _populate(start + chunk * size // chunks, start + (chunk + 1) * size // chunks)
                if error:  # whoever touches a page first will find out what is wrong
                    _log.warning("memory is not given its pages ahead of use: %s", os.strerror(error))
                    return


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _populate(start: int, end: int) -> int:
    """Make the pages of these addresses; 0, or the system's error number. Other threads run meanwhile."""
    start -= start % mmap.PAGESIZE
    while _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE):
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0
