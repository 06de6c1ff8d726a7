"""Waiting ends when it should: at the last arrival, at the deadline, or when it has become vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.jit.atomics import fetch_add, load_acquire, now_ns, store_release
from shoal.jit.barrier import BARRIER_BYTES, break_barrier, meet, reset_barrier
from shoal.jit.compile import kernel
from shoal.jit.team import aligned_zeros
from shoal.jit.waiting import ABANDONED, COUNTER_BYTES, FOREVER, LATE, OK, raise_counter, wait_for

TIMEOUT_NS = 60_000_000_000


@kernel
def go_round(area: int, shared: int, count: int, rounds: int, spin_ns: int) -> int:
    """Every participant adds 1 a round; between two meetings all see the same multiple of ``count``."""
    deadline = now_ns() + TIMEOUT_NS
    for turn in range(rounds):
        fetch_add(shared, 1)
        if meet(area, count, 2 * turn, spin_ns, deadline) != OK:
            return -1
        if load_acquire(shared) != count * (turn + 1):
            return turn + 1
        if meet(area, count, 2 * turn + 1, spin_ns, deadline) != OK:
            return -1
    return 0


@kernel
def meet_until(area: int, count: int, passed: int, timeout_ns: int) -> int:
    return meet(area, count, passed, 0, now_ns() + timeout_ns)


@kernel
def wait_until(counter: int, target: int, timeout_ns: int, abandoned: int) -> int:
    return wait_for(counter, target, 0, now_ns() + timeout_ns, abandoned)


@kernel
def look(address: int) -> int:
    return load_acquire(address)


@kernel
def put(address: int, value: int) -> int:
    store_release(address, value)
    return value


@pytest.fixture
def area() -> Iterator[int]:
    memory = aligned_zeros(BARRIER_BYTES + COUNTER_BYTES)
    yield int(memory.ctypes.data)
    assert memory.size


@pytest.mark.parametrize("spin_ns", [0, 5_000])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_nobody_passes_before_the_last_has_come(area: int, count: int, spin_ns: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        futures = [
            pool.submit(go_round, area, area + BARRIER_BYTES, count, 50, spin_ns) for _ in range(count)
        ]
        assert [future.result() for future in futures] == [0] * count


def test_who_does_not_come_is_late_and_the_rest_are_released(area: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        patient = pool.submit(meet_until, area, 3, 0, TIMEOUT_NS)
        hasty = pool.submit(meet_until, area, 3, 0, 50_000_000)
        assert hasty.result() == LATE
        assert patient.result() == ABANDONED
    assert meet_until(area, 3, 1, TIMEOUT_NS) == ABANDONED, "it stays broken"


def test_a_broken_barrier_is_as_new_after_a_reset(area: int) -> None:
    break_barrier(area)
    assert meet_until(area, 1, 0, TIMEOUT_NS) == ABANDONED
    reset_barrier(area)
    assert meet_until(area, 1, 0, TIMEOUT_NS) == OK


def test_a_sleeping_waiter_is_woken_when_the_counter_is_raised(area: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for, area, 5, 0, FOREVER, 0)
        while look(area + 8) == 0:  # how many sleep
            threading.Event().wait(0.001)
        raise_counter(area, 4)
        assert not waiting.done()
        raise_counter(area, 5)
        assert waiting.result(60) == OK


def test_a_waiter_gives_up_at_its_deadline_or_when_told(area: int) -> None:
    started = time.monotonic()
    assert wait_until(area, 1, 30_000_000, 0) == LATE
    assert time.monotonic() - started >= 0.03
    put(area + COUNTER_BYTES, 1)
    assert wait_until(area, 1, TIMEOUT_NS, area + COUNTER_BYTES) == ABANDONED
    put(area, 1)
    assert wait_until(area, 1, TIMEOUT_NS, area + COUNTER_BYTES) == OK, "what has come has come"
