"""Memory that several processes of one host map, without a name that could be left behind. Knows not what
it is for.

On Linux it is an anonymous file, which the others open through its maker's entry in /proc: nothing is ever
listed anywhere, and the size of /dev/shm, small in containers, doesn't matter. Elsewhere it is a file with a
random name that only its owner can open, removed once everybody has it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy

__all__ = ["Segment", "host_identity", "watch_process"]


class Segment:
    """A mapping, which lasts as long as this object does.

    Args:
        file: open for reading and writing; closed here once mapped.
        num_bytes: its size.
        path: where other processes open it.
    """

    def __init__(self, file: int, num_bytes: int, path: str) -> None:
        self._file: int | None = file
        self.path = path
        self._memory: Any = numpy.frombuffer(mmap.mmap(file, num_bytes), numpy.uint8)
        self.address = int(self._memory.ctypes.data)

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """New zeroed memory. The others can open its path until :meth:`hide`.

        Raises:
            OSError: there is no room for it.
        """
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("shoal", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{file}"
        else:
            file, path = tempfile.mkstemp(prefix="shoal-")  # for its owner alone
        try:
            os.ftruncate(file, num_bytes)
            return cls(file, num_bytes, path)
        except OSError:
            os.close(file)
            raise

    @classmethod
    def attach(cls, path: str, num_bytes: int) -> Segment:
        """Another process's memory.

        Raises:
            OSError: it is not there, not ours, or smaller.
        """
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if status.st_uid != os.geteuid() or status.st_size < num_bytes:
                raise OSError(f"{path} is not what was to be shared")
            return cls(file, num_bytes, "")
        finally:
            os.close(file)

    def hide(self) -> None:
        """Nobody can open it any more; mappings stay."""
        if self.path:
            if not self.path.startswith("/proc/"):
                Path(self.path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a fork's copy of it may have been closed
                os.close(self._file or -1)
        self.path, self._file = "", None


def host_identity() -> str:
    """Equal for processes that can share memory, and see each other's process ids."""
    user = os.geteuid()
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {user}"
    return f"{platform.node()} {user}"


def watch_process(process_id: int) -> int:
    """A file that ``poll()`` finds readable once the process has ended; -1 where there is no such thing.

    Raises:
        OSError: there is no such process.
    """
    return os.pidfd_open(process_id) if hasattr(os, "pidfd_open") else -1
