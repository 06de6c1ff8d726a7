"""A rank answers what it is sent, reports what fails, and then ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

import shoal.worker.serve as module
from shoal.checkpoint.progress import Report
from shoal.errors import CheckpointError
from shoal.messages import (
    AllocateKV,
    Failure,
    LoadProgress,
    Ping,
    RankReady,
    RankReport,
    Shutdown,
    Start,
    Step,
    StepResult,
)
from shoal.worker.channel import Channel
from shoal.worker.serve import serve

START = Start(rank=3, world_size=4, config={}, model_path="", plan={}, rendezvous="")


class FakeWorker:
    """Answers at once; step 13 fails."""

    num_closed = 0

    def __init__(self, may_pin: bool = False) -> None:
        """Pins nothing."""

    def start(self, start: Start, report: Report) -> RankReport:
        if start.model_path == "damaged":
            raise CheckpointError("model: shard 2 is cut short", field="model")
        for done in range(1000):
            report(done, 1000)
        return RankReport(
            rank=start.rank, weight_bytes=1, bytes_read=1, load_s=0, kv_bytes_per_token=1, kv_budget_bytes=1
        )

    def allocate(self, message: AllocateKV) -> RankReady:
        raise MemoryError("no room for pages")

    def ping(self, ping: Ping) -> Ping:
        return ping

    def execute(self, step: Step) -> StepResult:
        if step.step_id == 13:
            raise RuntimeError("bad luck")
        return StepResult(step_id=step.step_id)

    def close(self) -> None:
        FakeWorker.num_closed += 1


@pytest.fixture
def engine_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """The other end of a rank that serves; afterwards it must have ended and closed its worker."""
    monkeypatch.setattr(module, "RankWorker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "num_closed", 0)
    ours, theirs = socket.socketpair()
    rank = threading.Thread(target=serve, args=(Channel(theirs),))
    rank.start()
    channel = Channel(ours)
    yield channel
    channel.close()
    rank.join(10)
    theirs.close()
    assert not rank.is_alive() and FakeWorker.num_closed == 1


def test_loading_reports_progress_a_hundred_times_at_most(engine_end: Channel) -> None:
    engine_end.send(START)
    messages = [engine_end.receive(5)]
    while isinstance(messages[-1], LoadProgress):
        messages.append(engine_end.receive(5))
    assert isinstance(messages[-1], RankReport) and messages[-1].rank == 3
    assert 50 < len(messages) <= 101


def test_steps_are_answered_until_a_shutdown(engine_end: Channel) -> None:
    for step_id in (1, 2):
        engine_end.send(Step(step_id=step_id, sequences=()))
        assert engine_end.receive(5) == StepResult(step_id=step_id)
    engine_end.send(Shutdown())


def test_a_ping_is_answered_in_its_turn(engine_end: Channel) -> None:
    for message in (Step(step_id=1, sequences=()), Ping(), Step(step_id=2, sequences=())):
        engine_end.send(message)
    assert [engine_end.receive(5) for _ in range(3)] == [StepResult(step_id=1), Ping(), StepResult(step_id=2)]


def test_a_closed_channel_ends_it(engine_end: Channel) -> None:
    engine_end.close()


def test_a_failure_is_reported_with_its_traceback_and_ends_it(engine_end: Channel) -> None:
    engine_end.send(START)
    while isinstance(engine_end.receive(5), LoadProgress):
        pass
    engine_end.send(Step(step_id=13, sequences=()))
    failure = engine_end.receive(5)
    assert isinstance(failure, Failure)
    assert (failure.rank, failure.kind, failure.message) == (3, "RuntimeError", "bad luck")
    assert "in execute" in failure.traceback and not failure.usage


def test_wrong_input_is_marked_as_such(engine_end: Channel) -> None:
    engine_end.send(Start(**{**_fields(START), "model_path": "damaged"}))
    failure = engine_end.receive(5)
    assert isinstance(failure, Failure) and failure.usage
    assert (failure.kind, failure.field) == ("CheckpointError", "model")


def _fields(start: Start) -> dict[str, object]:
    return {name: getattr(start, name) for name in start.__struct_fields__}


def test_memory_that_is_not_there_is_a_failure_like_any_other(engine_end: Channel) -> None:
    engine_end.send(AllocateKV(num_blocks=1, block_size=1))
    failure = engine_end.receive(5)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.message) == ("MemoryError", "no room for pages")


def test_a_message_no_rank_takes_is_a_failure(engine_end: Channel) -> None:
    engine_end.send(RankReady(rank=0, kv_bytes=0))
    failure = engine_end.receive(5)
    assert isinstance(failure, Failure) and "RankReady" in failure.message


def test_a_failure_nobody_hears_is_no_second_failure(engine_end: Channel) -> None:
    engine_end.send(Step(step_id=13, sequences=()))
    engine_end.close()


def test_ready_is_told_before_it_is_answered_and_before_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Roomy(FakeWorker):
        def allocate(self, message: AllocateKV) -> RankReady:
            return RankReady(rank=3, kv_bytes=message.num_blocks)

    monkeypatch.setattr(module, "RankWorker", Roomy)
    ours, theirs = socket.socketpair()
    channel, told = Channel(ours), []
    rank = threading.Thread(target=serve, args=(Channel(theirs), lambda: told.append("ready")))
    rank.start()
    channel.send(Step(step_id=1, sequences=()))
    assert channel.receive(5) == StepResult(step_id=1) and not told
    channel.send(AllocateKV(num_blocks=7, block_size=16))
    assert channel.receive(5) == RankReady(rank=3, kv_bytes=7) and told == ["ready"]
    channel.send(Shutdown())
    rank.join(10)
    channel.close()
    theirs.close()
    assert not rank.is_alive()
