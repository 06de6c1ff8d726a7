"""A rank above 0 of a model that another process parallelized: ``python -m shoal.parallel.member``.

Started by :mod:`.leader` only. It holds its part of the model and its own of every tensor the model keeps,
does what it is told, and dies with its parent.
"""

from __future__ import annotations

import os
import socket
import sys

from shoal.process.life import die_with_parent


def main() -> None:
    """Serve until the leader closes the channel, or a failure."""
    socket_fd, life_fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(life_fd)
    # Only now: importing torch takes seconds, in which the parent may die.
    from shoal.parallel.serve import serve
    from shoal.process.frames import Frames

    serve(Frames(socket.socket(fileno=socket_fd)))
    # The threads of gloo abort a process that ends in the usual way.
    os._exit(0)


if __name__ == "__main__":
    main()
