"""Every rank's answer is gathered, and of several that fail the one at fault is named."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import shoal.worker.replies as module
from shoal.errors import ConfigError, RankError, UnsupportedError, UsageError
from shoal.messages import Failure, LoadProgress, Message, Ping, RankReady, Step
from shoal.worker.channel import Channel
from shoal.worker.replies import gather_replies, pings_answered


class Group:
    """Three ranks: ``say`` speaks for one, ``gather`` listens to all."""

    def __init__(self) -> None:
        self.ours: dict[int, Channel] = {}
        self.theirs: dict[int, Channel] = {}
        for rank in range(3):
            here, there = socket.socketpair()
            self.ours[rank], self.theirs[rank] = Channel(here), Channel(there)

    def say(self, rank: int, message: Message | None = None) -> None:
        self.theirs[rank].send(message or RankReady(rank=rank, kv_bytes=rank))

    def fail(self, rank: int, kind: str, **more: Any) -> None:
        self.say(rank, Failure(rank=rank, kind=kind, message=f"what {rank} says", **more))

    def gather(self, timeout_s: float = 5, report: Any = None) -> list[RankReady]:
        return gather_replies(self.ours, RankReady, timeout_s, lambda rank: f"rank {rank} is gone", report)

    def error(self, timeout_s: float = 5) -> RankError:
        with pytest.raises(RankError) as caught:
            self.gather(timeout_s)
        return caught.value


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    for channel in (*made.ours.values(), *made.theirs.values()):
        channel.close()


def test_answers_come_in_rank_order_whoever_is_first(group: Group) -> None:
    for rank in (2, 0, 1):
        group.say(rank)
    assert [reply.rank for reply in group.gather()] == [0, 1, 2]


def test_progress_is_summed_over_ranks_and_does_not_count_as_the_answer(group: Group) -> None:
    for rank in range(3):
        group.say(rank, LoadProgress(done=rank, total=4))
        group.say(rank)
    seen: list[tuple[float, float]] = []
    group.gather(report=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 12)


def test_answers_to_pings_are_no_answers_to_what_came_after(group: Group) -> None:
    for rank in range(3):
        group.say(rank, Ping())
        group.say(rank)
    assert [reply.rank for reply in group.gather()] == [0, 1, 2]


def test_what_is_no_message_is_its_senders_failure(group: Group) -> None:
    group.theirs[1].send_bytes(b"nonsense")
    error = group.error()
    assert error.rank == 1 and "no message" in str(error)


def test_answers_to_pings_are_heard_without_waiting(group: Group) -> None:
    def heard() -> set[int]:
        return pings_answered(group.ours, lambda rank: f"rank {rank} is gone")

    assert heard() == set()
    group.say(2, Ping())
    assert heard() == {2}
    group.fail(1, "OSError")
    with pytest.raises(RankError, match="rank 1: OSError"):
        heard()
    group.theirs[0].close()
    with pytest.raises(RankError, match="rank 0 is gone"):
        heard()


def test_a_rank_that_closes_is_named(group: Group) -> None:
    group.say(0)
    group.theirs[1].close()
    error = group.error()
    assert (str(error), error.rank) == ("rank 1 is gone", 1)


def test_a_failure_is_raised_while_the_others_are_silent(group: Group) -> None:
    """They may wait for the failed one in a collective until the load timeout."""
    group.fail(1, "OSError")
    started = time.monotonic()
    error = group.error(60)
    assert (str(error), error.rank) == ("rank 1: OSError: what 1 says", 1)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("kind", [UnsupportedError, ConfigError, UsageError])
def test_wrong_input_is_raised_as_what_it_was(group: Group, kind: type[UsageError]) -> None:
    group.fail(2, kind.__name__, usage=True, field="model")
    with pytest.raises(UsageError, match="what 2 says") as caught:
        group.gather(60)
    assert type(caught.value) is kind and caught.value.field == "model"


def test_the_cause_is_raised_although_a_rank_that_missed_it_was_heard_first(group: Group) -> None:
    group.fail(0, "RankError")
    group.fail(1, "CheckpointError", usage=True)
    with pytest.raises(UsageError, match="what 1 says"):
        group.gather()


def test_the_cause_may_come_a_moment_later(group: Group) -> None:
    group.fail(0, "RankError")
    timer = threading.Timer(0.05, group.theirs[2].close)
    timer.start()
    error = group.error()
    timer.join()
    assert (str(error), error.rank) == ("rank 2 is gone", 2)


def test_who_stays_silent_while_the_others_missed_it_is_named(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CAUSE_S", 0.05)
    group.fail(0, "RankError")
    group.fail(2, "RankError")
    error = group.error(60)
    assert str(error) == "rank 1 did not do its part: rank 0: RankError: what 0 says"
    assert error.rank == 1


def test_when_all_missed_someone_the_first_is_raised(group: Group) -> None:
    for rank in range(3):
        group.fail(rank, "RankError")
    assert str(group.error(60)) == "rank 0: RankError: what 0 says"


def test_all_who_do_not_answer_in_time_are_named(group: Group) -> None:
    group.say(1)
    error = group.error(0.05)
    assert (str(error), error.rank) == ("ranks 0, 2 did not answer within 0.05 s", None)


def test_half_an_answer_is_not_waited_for(group: Group) -> None:
    group.theirs[0]._socket.sendall(b"\x10\x00")
    assert str(group.error(0.05)) == "rank 0 stopped in the middle of an answer"


def test_an_answer_to_something_else_is_refused(group: Group) -> None:
    group.say(0, Step(step_id=1, sequences=()))
    assert str(group.error()) == "rank 0 answered with Step"


def test_who_watches_ends_the_waiting(group: Group) -> None:
    def look() -> None:
        raise RankError("rank 1 was stopped", 1)

    group.say(0)
    with pytest.raises(RankError, match="rank 1 was stopped"):
        gather_replies(group.ours, RankReady, 30, lambda rank: f"rank {rank} is gone", None, look)
