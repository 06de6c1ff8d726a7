"""A rank's process: ``python -m shoal.worker CHANNEL_FD LIFE_FD``, started by the executor only.

Serves messages until told to stop, and dies with its parent.
"""

from __future__ import annotations

import socket
import sys

from shoal.process.life import die_with_parent


def main() -> None:
    """Serve until the channel closes or a shutdown comes."""
    channel_fd, life_fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(life_fd)
    # Only now: importing torch takes seconds, in which the parent may die.
    from shoal.process.heap import settle
    from shoal.worker.channel import Channel
    from shoal.worker.serve import serve

    serve(Channel(socket.socket(fileno=channel_fd)), on_ready=settle, may_pin=True)


if __name__ == "__main__":
    main()
