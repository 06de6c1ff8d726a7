"""The engine's thread answers every submission once, to the end, whatever sinks and ranks do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import shoal.engine.loop as module
from shoal.engine.core import EngineCore
from shoal.engine.loop import EngineLoop
from shoal.engine.outputs import RequestDelta
from shoal.errors import EngineDeadError, EngineError, RankError, RequestError
from shoal.sampling_params import SamplingParams
from support.engines import CountingExecutor, Gate, make_core
from support.loops import LONG, Inbox, submit


@pytest.fixture
def executor() -> CountingExecutor:
    return CountingExecutor()


@pytest.fixture
def loop(executor: CountingExecutor) -> Iterator[EngineLoop]:
    running = EngineLoop(make_core(executor))
    yield running
    executor.before = lambda: None
    running.stop()


def test_a_sink_hears_none_then_its_deltas(loop: EngineLoop) -> None:
    inbox = submit(loop, "a", SamplingParams(max_tokens=2))
    assert inbox.next() is None
    assert inbox.text() == "bc"
    assert loop.drain(10) and loop.num_open == 0 and inbox.is_empty


def test_a_refusal_is_an_answer(loop: EngineLoop) -> None:
    assert isinstance(submit(loop, "a" * 100).next(), RequestError)
    assert loop.drain(10)


def test_a_request_that_cannot_be_taken_in_harms_nobody(loop: EngineLoop) -> None:
    """What is not even token ids is that caller's trouble; the engine goes on."""
    inbox = Inbox()
    loop.submit("r", None, LONG, inbox)  # type: ignore[arg-type]
    assert isinstance(inbox.next(), (RequestError, EngineError))
    assert submit(loop, "a", SamplingParams(max_tokens=1)).text() == "b"


def test_a_sink_that_raises_loses_its_own_request_only(loop: EngineLoop, executor: CountingExecutor) -> None:
    gate = executor.before = Gate()
    told = []

    def closed(item: Any) -> None:
        told.append(item)
        if item is not None:
            raise RuntimeError("Event loop is closed")

    loop.submit("bad", [97], LONG, closed)
    good = submit(loop, "A")
    gate.open()
    assert good.text() == "BCDEFGHIJKLMNOPQRSTU"
    assert len(told) == 2, "taken in, and one delta it could not take"
    assert loop.drain(10) and loop.is_alive
    assert loop.stats().requests_total == {"abort": 1, "length": 1}


def test_an_aborted_request_frees_what_it_held(loop: EngineLoop, executor: CountingExecutor) -> None:
    gate = executor.before = Gate()
    inbox = submit(loop, "a")
    gate.wait_entered()
    loop.abort("a", inbox)
    gate.open()
    assert loop.drain(10)
    submit(loop, "b", SamplingParams(max_tokens=1)).text()
    assert loop.stats().requests_total == {"abort": 1, "length": 1}
    assert loop.stats().kv_cache_usage == 0


def test_aborting_a_refused_namesake_does_not_touch_the_owner(
    loop: EngineLoop, executor: CountingExecutor
) -> None:
    gate = executor.before = Gate()
    owner = submit(loop, "A", name="same")
    gate.wait_entered()
    namesake = submit(loop, "a", name="same")
    loop.abort("same", namesake)  # its caller went away before the refusal came
    gate.open()
    assert owner.text() == "BCDEFGHIJKLMNOPQRSTU"
    assert isinstance(namesake.next(), RequestError)


def test_aborting_what_has_just_finished_does_nothing(loop: EngineLoop) -> None:
    first = submit(loop, "a", SamplingParams(max_tokens=1), name="same")
    assert first.text() == "b"
    second = submit(loop, "a", SamplingParams(max_tokens=3), name="same")
    loop.abort("same", first)
    assert second.text() == "bcd"


def test_stopping_answers_everyone(loop: EngineLoop, executor: CountingExecutor) -> None:
    gate = executor.before = Gate()
    running = submit(loop, "a")
    assert running.next() is None
    gate.wait_entered()
    waiting = submit(loop, "b")  # still a command when the engine stops
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    while submit(loop, "c").is_empty:  # refused at once as soon as the stop is asked for
        pass
    gate.open()
    stopping.join(10)
    for inbox in (running, waiting):
        assert isinstance(inbox.last(), EngineDeadError)
    assert executor.num_shutdowns == 1 and loop.num_open == 0 and not loop.is_alive


def test_dead_ranks_answer_everyone_and_end_the_engine(loop: EngineLoop, executor: CountingExecutor) -> None:
    gate = Gate()

    def die() -> None:
        gate()
        raise RankError("rank 1 was killed by signal 9", 1)

    executor.before = die
    running = submit(loop, "a")
    assert running.next() is None
    gate.wait_entered()
    waiting = submit(loop, "b")
    gate.open()
    for inbox in (running, waiting):
        answer = inbox.next()
        assert isinstance(answer, EngineDeadError) and "signal 9" in str(answer)
    loop.stop()
    assert not loop.is_alive and executor.num_shutdowns == 1
    late = submit(loop, "c").next()
    assert isinstance(late, EngineDeadError) and "signal 9" in str(late)


def test_a_rank_that_dies_in_an_idle_moment_is_noticed(loop: EngineLoop, executor: CountingExecutor) -> None:
    executor.death = RankError("rank 0 was killed by signal 9", 0)
    loop._thread.join(5)
    assert not loop.is_alive
    assert "signal 9" in str(submit(loop, "a").next())


def test_who_ends_while_nothing_can_be_done_is_told(
    executor: CountingExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that ranks do not survive may be found out between steps."""
    core = make_core(executor)
    monkeypatch.setattr(EngineCore, "can_step", False)
    end = RequestDelta("a", [], finished=True, num_prompt_tokens=1, num_cached_tokens=0)
    core.check = lambda: [end]  # type: ignore[method-assign]
    running = EngineLoop(core)
    inbox = submit(running, "a")
    assert inbox.next() is None and inbox.next() is end
    assert running.drain(10)
    running.stop()


def test_a_raising_sink_does_not_keep_the_end_from_the_others(
    loop: EngineLoop, executor: CountingExecutor
) -> None:
    gate = Gate()

    def die() -> None:
        gate()
        raise RankError("gone")

    def closed(item: Any) -> None:
        if item is not None:
            raise RuntimeError("Event loop is closed")

    executor.before = die
    loop.submit("bad", [97], LONG, closed)
    good = submit(loop, "b")
    gate.open()
    assert good.next() is None
    assert isinstance(good.next(), EngineDeadError)
    loop.stop()
    assert executor.num_shutdowns == 1


def test_draining_waits_for_submissions_not_taken_in_yet(
    loop: EngineLoop, executor: CountingExecutor
) -> None:
    gate = executor.before = Gate()
    submit(loop, "a", SamplingParams(max_tokens=1))
    gate.wait_entered()
    submit(loop, "b", SamplingParams(max_tokens=1))
    assert loop.num_open == 2
    assert not loop.drain(0.01)
    gate.open()
    assert loop.drain(10)


def test_many_threads_submit_and_abort_at_once(loop: EngineLoop) -> None:
    """Every request that was not aborted is answered in full, and nothing stays."""

    def client(number: int) -> None:
        for turn in range(20):
            inbox = submit(loop, "A", SamplingParams(max_tokens=5), name=f"{number}-{turn}")
            if turn % 2:
                loop.abort(f"{number}-{turn}", inbox)
            else:
                assert inbox.text() == "BCDEF"
                answered.append(turn)

    answered: list[int] = []
    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(20)
    assert len(answered) == 40
    assert loop.drain(10)
    submit(loop, "a", SamplingParams(max_tokens=1)).text()
    assert loop.stats().kv_cache_usage == 0


def test_sinks_are_flushed_once_a_step_after_all_of_them(executor: CountingExecutor) -> None:
    told: list[str] = []
    ended = threading.Event()
    gate = executor.before = Gate()

    def flush() -> None:
        told.append("flush")
        if told.count("end") == 4:
            ended.set()

    def sink(item: Any) -> None:
        told.append("end" if item is not None and item.finished else "more")

    running = EngineLoop(make_core(executor), flush)
    running.submit("first", [97], SamplingParams(max_tokens=3), sink)
    gate.wait_entered()
    for name in "abc":
        running.submit(name, [97], SamplingParams(max_tokens=2), sink)
    gate.open()
    assert ended.wait(10)
    running.stop()
    taken_in, *later = "".join(word[0] for word in told).split("f")
    assert taken_in == "m"
    # The first one's token; the three taken in; two steps of all four, in the last of which all end.
    assert later[:4] == ["m", "mmm", "mmmm", "eeee"] and not any(later[4:])


def test_those_who_run_do_not_wait_for_all_who_arrive(
    executor: CountingExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_TAKEN", 2)
    gate, told = Gate(), []
    ended = threading.Semaphore(0)

    def before() -> None:
        gate()
        told.append("step")

    def sink(item: Any) -> None:
        if item is None:
            told.append("taken")
        elif item.finished:
            ended.release()

    executor.before = before
    running = EngineLoop(make_core(executor))
    for name in "abcdef":
        running.submit(name, [97], SamplingParams(max_tokens=9), sink)
        if name == "a":
            gate.wait_entered()
    gate.open()
    assert all(ended.acquire(timeout=10) for _ in "abcdef")
    running.stop()
    assert told[:9] == ["taken", "step", "taken", "taken", "step", "taken", "taken", "step", "taken"]


def test_in_debug_mode_an_idle_engine_looks_whether_its_books_agree(
    caplog: pytest.LogCaptureFixture, executor: CountingExecutor
) -> None:
    looked = threading.Event()
    core = make_core(executor)
    core.check_integrity = looked.set  # type: ignore[method-assign]
    caplog.set_level("DEBUG", "shoal.engine")
    running = EngineLoop(core)
    assert looked.wait(10)
    running.stop()
