"""Ranks that failed are started anew, not too often and not too soon, and never behind the caller's back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shoal.engine.supervisor import RestartPolicy, Supervisor
from shoal.errors import EngineDeadError, RankError
from support.engines import CountingExecutor, Gate

CAUSE = RankError("rank 1 was killed by signal 9", 1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(max_restarts: int, executor: CountingExecutor | None = None) -> tuple[Supervisor, Clock]:
    clock = Clock()
    policy = RestartPolicy(max_restarts, window_s=100)
    return Supervisor(executor or CountingExecutor(), policy, clock), clock


def ended(supervisor: Supervisor) -> bool:
    supervisor.wait(10)
    return supervisor.poll()


def failing(times: int) -> Callable[[], None]:
    left = [times]

    def load() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RankError("rank 0 exited with status 1", 0)

    return load


def test_a_failure_is_followed_by_one_start() -> None:
    executor = CountingExecutor()
    supervisor, _ = make(1, executor)
    told = threading.Event()
    supervisor.on_ended = told.set
    assert supervisor.poll()
    supervisor.lose(CAUSE)
    assert supervisor.is_recovering
    assert ended(supervisor) and told.wait(10)
    assert not supervisor.is_recovering
    assert (executor.num_loads, supervisor.num_restarts) == (1, 1)


def test_a_recovery_is_found_by_polling_only() -> None:
    executor = CountingExecutor()
    gate = executor.at_load = Gate()
    supervisor, _ = make(1, executor)
    supervisor.lose(CAUSE)
    gate.wait_entered()
    assert not supervisor.poll()
    gate.open()
    supervisor.wait(10)
    assert supervisor.is_recovering
    assert supervisor.poll()


def test_too_many_failures_within_the_window_are_the_end_at_once() -> None:
    supervisor, clock = make(2)
    for _ in range(2):
        supervisor.lose(CAUSE)
        assert ended(supervisor)
        supervisor.worked()
    with pytest.raises(EngineDeadError, match=r"signal 9 \(max_restarts: 2 within 100 s\)") as caught:
        supervisor.lose(CAUSE)
    assert caught.value.__cause__ is CAUSE and not supervisor.is_recovering
    clock.now = 101
    supervisor.lose(CAUSE)
    assert ended(supervisor), "what is long ago does not count"


def test_a_start_that_fails_is_tried_again() -> None:
    executor = CountingExecutor()
    executor.at_load = failing(1)
    supervisor, _ = make(2, executor)
    supervisor.lose(CAUSE)
    assert ended(supervisor)
    assert (executor.num_loads, supervisor.num_restarts) == (2, 1)


def test_starts_that_go_on_failing_are_the_end_and_named() -> None:
    executor = CountingExecutor()
    executor.at_load = failing(9)
    supervisor, _ = make(2, executor)
    supervisor.lose(CAUSE)
    for _ in range(2):  # and ever after
        with pytest.raises(EngineDeadError, match="exited with status 1"):
            ended(supervisor)
    assert executor.num_loads == 2


def test_pauses_grow_while_no_step_is_answered() -> None:
    supervisor, _ = make(9)
    assert [supervisor._next_pause(CAUSE) for _ in range(4)] == [0, 0.5, 1, 2]
    supervisor.worked()
    assert [supervisor._next_pause(CAUSE) for _ in range(2)] == [0, 0.5]


def test_starts_that_do_not_count_are_always_made() -> None:
    supervisor, _ = make(0)
    supervisor.lose(CAUSE, is_counted=False)
    assert ended(supervisor)


def test_ranks_that_are_not_ours_are_not_started() -> None:
    executor = CountingExecutor()
    executor.is_replaceable = False
    supervisor, _ = make(9, executor)
    with pytest.raises(EngineDeadError, match="not ours"):
        supervisor.lose(CAUSE)
    assert executor.num_loads == 0


def test_stopping_ends_a_start_under_way() -> None:
    executor = CountingExecutor()
    gate = executor.at_load = Gate()
    executor.interrupt = gate.open  # type: ignore[method-assign]
    supervisor, _ = make(9, executor)
    supervisor.lose(CAUSE)
    gate.wait_entered()
    supervisor.stop()
    supervisor.stop()
    assert not any(thread.name == "shoal-supervisor" for thread in threading.enumerate())


def test_stopping_ends_a_pause() -> None:
    executor = CountingExecutor()
    executor.at_load = failing(99)
    supervisor, _ = make(99, executor)
    supervisor._num_fruitless = 10  # 30 seconds
    supervisor.lose(CAUSE)
    supervisor.stop()
    assert executor.num_loads == 0
