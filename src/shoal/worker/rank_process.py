"""One rank's process, as the executor holds it. Knows no message and no other rank."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

import psutil

from shoal.comm.torch_dist import use_loopback
from shoal.errors import RankError
from shoal.process.child import Child, spawn
from shoal.worker.channel import Channel

__all__ = ["RankProcess", "StopWatch"]

_OBITUARY_S = 0.3  # for one that has closed its channel to end: its loss must be told within a second


class RankProcess(Child):
    """One rank's process and the channel to it."""

    def __init__(self, rank: int) -> None:
        super().__init__(_spawn)
        self.rank = rank
        self.channel = Channel(self.socket)

    def obituary(self, wait_s: float = _OBITUARY_S) -> str:
        """What became of it, with its number: ``rank 1 was killed by signal 9``."""
        return f"rank {self.rank} {super().obituary(wait_s)}"

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, and none has let it go on."""
        try:
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:  # it is gone, which its channel says
            return False


class StopWatch:
    """Notices ranks that are stopped while they load, and cannot be asked for a sign of life.

    Args:
        ranks: to look at.
        timeout_s: for which one may be stopped.
    """

    def __init__(self, ranks: Sequence[RankProcess], timeout_s: float) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._since: dict[int, float] = {}

    def look(self) -> None:
        """To be called a few times a second.

        Raises:
            RankError: one has been stopped for too long.
        """
        now = time.monotonic()
        for rank in self._ranks:
            if not rank.is_stopped():
                self._since.pop(rank.rank, None)
            elif now - self._since.setdefault(rank.rank, now) > self._timeout_s:
                raise RankError(f"rank {rank.rank} was stopped while it loaded", rank.rank)


def _spawn(channel_fd: int, life_fd: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    use_loopback(environment)
    return spawn("shoal.worker", channel_fd, life_fd, environment)
