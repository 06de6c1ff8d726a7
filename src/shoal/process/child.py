"""A process of ours and the socket to it. Knows no message.

Children are started fresh (``python -m``), never forked: GNU OpenMP kills forked children, and
multiprocessing's spawn would run the user's file again.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["Child", "spawn"]


class Child:
    """One child and our end of the socket to it.

    The child also inherits the read end of a pipe whose write end only this process holds: when this
    process is gone, however it went, the child reads the end of file and exits (see :mod:`.life`).

    Args:
        start: starts the process, given the descriptors of its end of the socket and of the pipe.
    """

    def __init__(self, start: Callable[[int, int], subprocess.Popen[bytes]]) -> None:
        self.socket, theirs = socket.socketpair()
        life_read, self._life_write = os.pipe()
        try:
            self.process = start(theirs.fileno(), life_read)
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(life_read)

    def stop(self, deadline: float) -> None:
        """Wait for the process until ``deadline`` (monotonic), then kill it."""
        try:
            self.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._close()

    def obituary(self, wait_s: float = 2.0) -> str:
        """What became of the process, for people: ``was killed by signal 9``, ``exited with status 1``."""
        try:
            status = self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"

    def _close(self) -> None:
        self.socket.close()
        if self._life_write >= 0:
            os.close(self._life_write)
            self._life_write = -1


def spawn(module: str, socket_fd: int, life_fd: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start ``python -m module SOCKET_FD LIFE_FD``, with shoal importable from wherever the caller runs."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = (package_root, environment.get("PYTHONPATH"))
    return subprocess.Popen(
        [sys.executable, "-m", module, str(socket_fd), str(life_fd)],
        env={**environment, "PYTHONPATH": os.pathsep.join(entry for entry in path if entry)},
        pass_fds=(socket_fd, life_fd),
        stdin=subprocess.DEVNULL,
        stdout=_stderr_or_null(),
        start_new_session=True,  # Ctrl-C in a terminal is the parent's to handle
    )


def _stderr_or_null() -> int:
    """A child's stdout goes to stderr, so that ours carries only what the user asked for."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
