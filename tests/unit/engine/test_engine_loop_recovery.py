"""What the engine's thread does while ranks that failed are started anew, and when they cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.engine.loop import EngineLoop
from shoal.engine.supervisor import RestartPolicy
from shoal.errors import EngineDeadError, RankError, RequestError
from shoal.sampling_params import SamplingParams
from support.engines import CountingExecutor, Gate, make_core
from support.loops import submit


@pytest.fixture
def executor() -> CountingExecutor:
    return CountingExecutor()


class Recovering:
    """A loop whose ranks fail in the step that it is told, and load as ``gate`` lets."""

    def __init__(self, executor: CountingExecutor, max_restarts: int = 1) -> None:
        self.executor = executor
        self.gate = executor.at_load = Gate()
        self.loop = EngineLoop(make_core(executor, restarts=RestartPolicy(max_restarts)))

    def fail_in_step(self, number: int) -> None:
        def die() -> None:
            if len(self.executor.steps) == number:
                raise RankError("rank 1 was killed by signal 9", 1)

        self.executor.before = die

    def stop(self) -> None:
        self.gate.open()
        self.loop.stop()


@pytest.fixture
def recovering(executor: CountingExecutor) -> Iterator[Recovering]:
    made = Recovering(executor)
    yield made
    made.stop()


def test_streams_go_on_where_they_were_when_ranks_have_failed(recovering: Recovering) -> None:
    recovering.fail_in_step(5)
    inbox = submit(recovering.loop, "A")
    recovering.gate.wait_entered()
    assert recovering.loop.is_alive and not recovering.loop.is_ready
    other = submit(recovering.loop, "a", SamplingParams(max_tokens=3))
    assert other.next() is None, "taken in meanwhile"
    recovering.gate.open()
    assert inbox.text() == "BCDEFGHIJKLMNOPQRSTU"
    assert other.text() == "bcd"
    assert recovering.loop.is_ready
    stats = recovering.loop.stats()
    assert (stats.restarts_total, stats.replays_total) == (1, 1)
    assert stats.generation_tokens_total == 23, "none twice"


def test_commands_are_obeyed_while_ranks_are_started(recovering: Recovering) -> None:
    recovering.fail_in_step(1)
    inbox = submit(recovering.loop, "a")
    recovering.gate.wait_entered()
    recovering.loop.abort("a", inbox)
    assert recovering.loop.drain(10)
    assert isinstance(submit(recovering.loop, "a" * 100).next(), RequestError)
    recovering.gate.open()
    assert submit(recovering.loop, "b", SamplingParams(max_tokens=1)).text() == "c"


def test_ranks_that_die_in_an_idle_moment_are_started_anew(recovering: Recovering) -> None:
    recovering.executor.death = RankError("rank 0 was killed by signal 9", 0)
    recovering.gate.wait_entered()
    recovering.executor.death = None
    assert not recovering.loop.is_ready
    recovering.gate.open()
    assert submit(recovering.loop, "a", SamplingParams(max_tokens=1)).text() == "b"
    assert recovering.loop.stats().restarts_total == 1


def test_stopping_while_ranks_are_started_answers_everyone(recovering: Recovering) -> None:
    recovering.executor.interrupt = recovering.gate.open  # type: ignore[method-assign]
    recovering.fail_in_step(1)
    inbox = submit(recovering.loop, "a")
    recovering.gate.wait_entered()
    recovering.loop.stop()
    assert isinstance(inbox.last(), EngineDeadError)


def test_ranks_that_cannot_be_started_answer_everyone(executor: CountingExecutor) -> None:
    def refuse() -> None:
        raise RankError("rank 0 exited with status 1", 0)

    running = EngineLoop(make_core(executor, restarts=RestartPolicy(2)))
    executor.at_load = executor.before = refuse
    inboxes = [submit(running, name) for name in "ab"]
    for inbox in inboxes:
        answer = inbox.last_error()
        assert (
            str(answer) == "the engine has failed: rank 0 exited with status 1 (max_restarts: 2 within 300 s)"
        )
    running.stop()
    assert executor.num_loads == 2 and executor.num_shutdowns == 1
