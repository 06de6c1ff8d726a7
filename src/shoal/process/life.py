"""The child's side of living no longer than its parent. Imports next to nothing, so as to start quickly."""

from __future__ import annotations

import os
import select
import signal
import threading

__all__ = ["die_with_parent", "watch"]

_POLL_MS = 1000


def die_with_parent(life_fd: int) -> None:
    """End this process, whatever it is waiting for, within a second of its parent's end.

    To be called before anything slow is imported: the parent may die meanwhile. Ctrl-C is the parent's.

    Args:
        life_fd: read end of a pipe whose write end only the parent holds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watcher = threading.Thread(target=watch, args=(life_fd, os.getppid()), name="shoal-life", daemon=True)
    watcher.start()


def watch(life_fd: int, parent: int) -> None:
    """Return never: end this process at the end of file on ``life_fd``, or when its parent is another one."""
    life = select.poll()  # select() refuses descriptors above 1023, and a busy parent hands such ones down
    life.register(life_fd, select.POLLIN)
    # The second test is for a write end that leaked into some other child of the parent's.
    while not life.poll(_POLL_MS) and os.getppid() == parent:
        pass
    os._exit(1)
