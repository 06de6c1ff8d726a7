"""Operations on shared words are atomic, and sleepers are woken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy

from shoal.jit import atomics
from shoal.jit.compile import kernel


@kernel
def add_often(address: int, times: int) -> int:
    for _ in range(times):
        atomics.fetch_add(address, 1)
    return times


@kernel
def add_by_exchange(address: int, times: int) -> int:
    for _ in range(times):
        seen = atomics.load_acquire(address)
        while True:
            before = atomics.compare_exchange(address, seen, seen + 1)
            if before == seen:
                break
            seen = before
            atomics.relax()
    return times


@kernel
def hand_over(data: int, ready: int, times: int) -> int:
    for turn in range(1, times + 1):
        atomics.store_release(data, 2 * turn)
        atomics.fence()
        atomics.store_release(ready, turn)
        while atomics.load_acquire(ready) != -turn:
            atomics.yield_cpu()
    return times


@kernel
def take_over(data: int, ready: int, times: int) -> int:
    right = 0
    for turn in range(1, times + 1):
        while atomics.load_acquire(ready) != turn:
            atomics.yield_cpu()
        right += atomics.load_acquire(data) == 2 * turn
        atomics.store_release(ready, -turn)
    return right


@kernel
def now() -> int:
    return atomics.now_ns()


@kernel
def sleep_on(address: int, expected: int, timeout_ns: int) -> int:
    atomics.futex_wait(address, expected, timeout_ns)
    return atomics.load_acquire(address)


@kernel
def wake(address: int, value: int) -> int:
    atomics.store_release(address, value)
    atomics.futex_wake(address)
    return value


def in_threads(*calls: Callable[[], object]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def word(count: int = 1) -> tuple[numpy.ndarray, int]:
    memory = numpy.zeros(count, numpy.int64)
    return memory, int(memory.ctypes.data)


def test_additions_of_several_threads_are_all_counted() -> None:
    for add in (add_often, add_by_exchange):
        memory, address = word()
        in_threads(*[lambda add=add, address=address: add(address, 20_000)] * 3)
        assert memory[0] == 60_000


def test_a_compare_exchange_that_does_not_match_changes_nothing() -> None:
    @kernel
    def exchange(address: int, expected: int, value: int) -> int:
        return atomics.compare_exchange(address, expected, value)

    memory, address = word()
    memory[0] = 5
    assert exchange(address, 4, 9) == 5
    assert memory[0] == 5
    assert exchange(address, 5, 9) == 5
    assert memory[0] == 9


def test_what_was_stored_before_a_release_is_seen_after_it() -> None:
    memory, data = word(16)
    ready = data + 64
    _, right = in_threads(lambda: hand_over(data, ready, 500), lambda: take_over(data, ready, 500))
    assert right == 500
    assert memory[8] == -500


def test_the_clock_is_the_monotonic_one() -> None:
    before, between, after = time.monotonic_ns(), now(), time.monotonic_ns()
    assert before <= between <= after


def test_a_sleeper_ends_at_its_timeout_at_once_if_the_value_differs_and_when_woken() -> None:
    memory, address = word()
    started = time.monotonic()
    assert sleep_on(address, 0, 20_000_000) == 0
    assert sleep_on(address, 1, 3_600_000_000_000) == 0
    woken = threading.Thread(target=lambda: sleep_on(address, 0, 3_600_000_000_000))
    woken.start()
    while woken.is_alive():  # it may fall asleep only after the first of these
        wake(address, 7)
        woken.join(0.01)
    assert time.monotonic() - started < 60
    assert memory[0] == 7
