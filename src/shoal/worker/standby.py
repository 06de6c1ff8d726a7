"""Processes that wait to become ranks: what takes a process seconds to import, they have imported. Knows no
model and no group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shoal.errors import RankError
from shoal.messages import Ping
from shoal.worker.channel import Channel

__all__ = ["Standby"]

_log = logging.getLogger("shoal.worker")

_ANSWER_S = (
    1.0  # for one that is taken to say that it lives; if it does not, a fresh process is the safer choice
)


class Waiting(Protocol):
    """A process that answers pings."""

    channel: Channel

    def stop(self, deadline: float) -> None:
        """Wait for its end until ``deadline`` (monotonic), then kill it."""
        ...


W = TypeVar("W", bound=Waiting)


class Standby(Generic[W]):
    """One such process a rank, once :meth:`fill` was called.

    Args:
        make: starts the process of a rank.
    """

    def __init__(self, make: Callable[[int], W]) -> None:
        self._make = make
        self._waiting: dict[int, W] = {}
        self._has_failed = False

    def fill(self, num_ranks: int) -> None:
        """Start those that are missing; returns without waiting for them. Where none can be started, the log
        says so, and it is not tried again.
        """
        try:
            while not self._has_failed and (missing := set(range(num_ranks)) - self._waiting.keys()):
                rank = min(missing)
                self._waiting[rank] = process = self._make(rank)
                process.channel.send(Ping())  # its answer will say that it has imported all
        except OSError as error:
            self._has_failed = True
            _log.warning("no more processes are kept on standby: %s", error)

    def take(self, rank: int) -> W:
        """The process that waits for ``rank``, if it is ready; else a fresh one."""
        process = self._waiting.pop(rank, None)
        if process is None:
            return self._make(rank)
        try:
            process.channel.send(Ping(), _ANSWER_S)
            for _ in range(2):
                if not isinstance(process.channel.receive(_ANSWER_S), Ping):
                    raise RankError("a process on standby said something else than that it lives", rank)
        except (OSError, EOFError, RankError):  # it was killed or stopped, or still imports
            process.stop(0.0)
            return self._make(rank)
        return process

    def close(self) -> None:
        """End all that wait."""
        for process in self._waiting.values():
            process.stop(0.0)
        self._waiting = {}
