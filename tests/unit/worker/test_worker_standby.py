"""A process on standby becomes a rank if it lives; where it does not, a fresh one does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from shoal.messages import Ping, Shutdown
from shoal.worker.channel import Channel
from shoal.worker.standby import Standby


class Process:
    """Answers pings on a thread, unless it is mute."""

    def __init__(self, rank: int, is_mute: bool = False) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        self.channel, self._theirs = Channel(ours), Channel(theirs)
        self.is_stopped = False
        self._thread = threading.Thread(target=self._answer, args=(is_mute,))
        self._thread.start()

    def _answer(self, is_mute: bool) -> None:
        try:
            while isinstance(message := self._theirs.receive(), Ping):
                if not is_mute:
                    self._theirs.send(message)
        except (EOFError, OSError):
            return  # it is stopped
        finally:
            self._theirs.close()

    def die(self) -> None:
        self.channel.send(Shutdown())
        self._thread.join()

    def stop(self, deadline: float) -> None:
        self.is_stopped = True
        self.channel.close()
        self._thread.join()


class Made(list[Process]):
    """All processes there have been."""

    are_mute = False

    def __call__(self, rank: int) -> Process:
        self.append(Process(rank, self.are_mute))
        return self[-1]


@pytest.fixture
def made() -> Iterator[Made]:
    processes = Made()
    yield processes
    for process in processes:
        if not process.is_stopped:
            process.stop(0)


def test_without_any_a_rank_is_a_fresh_process(made: Made) -> None:
    standby = Standby(made)
    assert standby.take(1).rank == 1 and len(made) == 1


def test_who_waits_becomes_the_rank_and_is_replaced_at_the_next_fill(made: Made) -> None:
    standby = Standby(made)
    standby.fill(2)
    standby.fill(2)
    assert [process.rank for process in made] == [0, 1]
    assert standby.take(1) is made[1]
    standby.fill(2)
    assert [process.rank for process in made] == [0, 1, 1]
    standby.close()
    assert [process.is_stopped for process in made] == [True, False, True]


def test_who_has_died_is_not_taken(made: Made) -> None:
    standby = Standby(made)
    standby.fill(1)
    made[0].die()
    assert standby.take(0) is made[1]
    assert made[0].is_stopped


def test_who_does_not_answer_is_not_taken(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.worker.standby._ANSWER_S", 0.05)
    made.are_mute = True
    standby = Standby(made)
    standby.fill(1)
    assert standby.take(0) is made[1]
    assert made[0].is_stopped


def test_where_no_process_can_be_started_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tries = []

    def fails(rank: int) -> Process:
        tries.append(rank)
        raise OSError("try again later")

    standby = Standby(fails)
    standby.fill(2)
    standby.fill(2)
    assert tries == [0]
    assert caplog.text.count("try again later") == 1
