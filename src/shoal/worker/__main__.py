"""A rank's process: ``python -m shoal.worker CHANNEL_FD LIFE_FD``, started by the executor only.

Serves messages until told to stop, and dies with its parent: the end of file on LIFE_FD means that the
parent is gone, whatever else this process is waiting for.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading

_POLL_MS = 1000


def _die_with_parent(life_fd: int, parent: int) -> None:
    life = select.poll()  # select() refuses descriptors above 1023, and a busy parent hands such ones down
    life.register(life_fd, select.POLLIN)
    # The second test is for a write end that leaked into some other child of the parent's.
    while not life.poll(_POLL_MS) and os.getppid() == parent:
        pass
    os._exit(1)


def main() -> None:
    """Serve until the channel closes or a shutdown comes."""
    channel_fd, life_fd = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watcher = threading.Thread(
        target=_die_with_parent, args=(life_fd, os.getppid()), name="shoal-life", daemon=True
    )
    watcher.start()
    # Only now: importing torch takes seconds, in which the parent may die.
    from shoal.worker.channel import Channel
    from shoal.worker.serve import serve

    serve(Channel(socket.socket(fileno=channel_fd)))


if __name__ == "__main__":
    main()
