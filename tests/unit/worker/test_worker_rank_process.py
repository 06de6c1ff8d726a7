"""A rank that a signal stops while it loads is noticed, and one that goes on again is not blamed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from shoal.errors import RankError
from shoal.worker import rank_process
from shoal.worker.rank_process import RankProcess, StopWatch


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rank_process, "time", made)
    return made


def _rank(process: subprocess.Popen[bytes]) -> RankProcess:
    holder = SimpleNamespace(rank=3, process=process)
    holder.is_stopped = lambda: RankProcess.is_stopped(cast(Any, holder))
    return cast(RankProcess, holder)


def _wait_for(process: subprocess.Popen[bytes], is_so: Callable[[str], bool]) -> None:
    while not is_so(psutil.Process(process.pid).status()):
        pass


def test_only_one_that_stays_stopped_is_blamed(process: subprocess.Popen[bytes], clock: Clock) -> None:
    watch = StopWatch([_rank(process)], 2.0)
    watch.look()
    process.send_signal(signal.SIGSTOP)
    _wait_for(process, lambda status: status == psutil.STATUS_STOPPED)
    watch.look()
    clock.now = 1.9
    watch.look()
    process.send_signal(signal.SIGCONT)
    _wait_for(process, lambda status: status != psutil.STATUS_STOPPED)
    clock.now = 3.0
    watch.look()
    process.send_signal(signal.SIGSTOP)
    _wait_for(process, lambda status: status == psutil.STATUS_STOPPED)
    watch.look()
    clock.now = 5.1
    with pytest.raises(RankError, match="rank 3 was stopped while it loaded") as caught:
        watch.look()
    assert caught.value.rank == 3


def test_one_that_is_gone_is_not_stopped(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert not RankProcess.is_stopped(cast(Any, SimpleNamespace(process=process)))
