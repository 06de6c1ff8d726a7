"""Whether ranks that have nothing to do still answer. Knows no process and no step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from shoal.worker.channel import Channel
from shoal.worker.replies import late, pings_answered

__all__ = ["Pulse"]

# Of the time in which a rank that stops must be noticed. The rest is for two looks, one to ask and one to
# find that nobody has answered, and for ending the group.
_PAUSE_SHARE = 0.1
_PATIENCE_SHARE = 0.6


class Pulse:
    """Asks idle ranks for a sign of life now and then.

    Args:
        timeout_s: within which a rank that stops is noticed.
    """

    def __init__(self, timeout_s: float) -> None:
        self._pause_s = timeout_s * _PAUSE_SHARE
        self._patience_s = timeout_s * _PATIENCE_SHARE
        self._asked_at = time.monotonic()
        self._silent: set[int] = set()  # were asked, and have not answered

    def look(
        self, channels: Mapping[int, Channel], ask: Callable[[], None], gone: Callable[[int], str]
    ) -> None:
        """Read what answers there are; ask again when it is time. To be called a few times a second.

        Args:
            channels: by rank.
            ask: sends a ping to every rank.
            gone: what to say of the rank whose end closed.

        Raises:
            RankError: a rank failed, closed its channel, or has not answered in time.
        """
        self._silent -= pings_answered(channels, gone)
        waited_s = time.monotonic() - self._asked_at
        if self._silent:
            if waited_s > self._patience_s:
                raise late(sorted(self._silent), self._patience_s)
        elif waited_s > self._pause_s:
            self._silent = set(channels)
            self._asked_at = time.monotonic()
            ask()

    def felt(self) -> None:
        """Every rank has answered what it was sent last, and so all pings before."""
        self._silent.clear()
        self._asked_at = time.monotonic()
