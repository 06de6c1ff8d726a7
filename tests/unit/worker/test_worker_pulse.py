"""Idle ranks are asked for a sign of life; one that gives none in time is named."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import shoal.worker.pulse as module
from shoal.errors import RankError
from shoal.messages import Ping
from shoal.worker.channel import Channel
from shoal.worker.pulse import Pulse


class Clock:
    """Stands in for ``time``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Group:
    """Two ranks, asked after 0.5 s and given 3 s to answer; ``at`` sets the clock and looks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        pairs = [socket.socketpair() for _ in range(2)]
        self.ours = {rank: Channel(pair[0]) for rank, pair in enumerate(pairs)}
        self.theirs = [Channel(pair[1]) for pair in pairs]
        self.num_asked = 0
        self.pulse = Pulse(5.0)

    def ask(self) -> None:
        self.num_asked += 1

    def at(self, now: float) -> int:
        self.clock.now = now
        self.pulse.look(self.ours, self.ask, lambda rank: f"rank {rank} is gone")
        return self.num_asked


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    made = Group(clock)
    yield made
    for channel in (*made.ours.values(), *made.theirs):
        channel.close()


def test_ranks_are_asked_now_and_then_as_long_as_they_answer(group: Group) -> None:
    assert [group.at(now) for now in (0.4, 0.6, 1.6)] == [0, 1, 1]
    for channel in group.theirs:
        channel.send(Ping())
    assert [group.at(now) for now in (1.7, 1.8, 2.3)] == [2, 2, 2]


def test_a_rank_that_does_not_answer_is_named_in_time(group: Group) -> None:
    group.at(1.1)
    group.theirs[0].send(Ping())
    group.at(4.0)
    with pytest.raises(RankError, match=r"^rank 1 did not answer within 3 s") as caught:
        group.at(4.2)
    assert caught.value.rank == 1


def test_an_answer_that_lay_there_while_nobody_looked_counts(group: Group) -> None:
    group.at(1.1)
    for channel in group.theirs:
        channel.send(Ping())
    assert group.at(100.0) == 2


def test_an_answered_step_is_a_sign_of_life(group: Group) -> None:
    group.at(1.1)
    group.pulse.felt()
    assert group.at(1.5) == 1
    assert group.at(1.7) == 2


def test_a_closed_channel_is_seen_at_once(group: Group) -> None:
    group.theirs[1].close()
    with pytest.raises(RankError, match="rank 1 is gone"):
        group.at(0.1)
