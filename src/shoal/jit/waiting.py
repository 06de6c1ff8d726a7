"""Waiting for a counter to rise, and raising it: spin, then sleep. Knows not what is counted.

A counter is two int64 words in one cache line: the value, which only rises, and how many sleep on it. It may
lie in memory that several processes share. A sleeper that is killed leaves its mark; all that costs is a
system call at each later raise.

Nobody yields in between: where another process wants the core, a yield gives it a whole time slice, while a
sleeper that is woken gets the core back at once. (Two ranks on two cores beside one busy process took 2.2 ms
a sum on average with yields, 0.1 ms without; on cores of their own it makes no difference.)
"""

from __future__ import annotations

from shoal.jit.atomics import (
    fence,
    fetch_add,
    futex_wait,
    futex_wake,
    load_acquire,
    now_ns,
    relax,
    store_release,
)
from shoal.jit.compile import kernel

__all__ = [
    "ABANDONED",
    "COUNTER_BYTES",
    "FOREVER",
    "LATE",
    "OK",
    "raise_counter",
    "wait_for",
    "wake_sleepers",
]

COUNTER_BYTES = 64  # a cache line
_SLEEPERS = 8  # bytes from a counter's value to its sleepers

OK, LATE, ABANDONED = 0, 1, 2
FOREVER = 2**63 - 1  # a deadline that never comes

_RELAXED_TURNS = 32  # between two looks at the clock, about half a microsecond
_NAP_NS = 50_000_000  # a sleeper looks at ``abandoned`` this often at the least


@kernel
def wait_for(counter: int, target: int, spin_ns: int, deadline_ns: int, abandoned: int) -> int:
    """Wait until the counter is at least ``target``.

    Args:
        counter: its address.
        spin_ns: how long to spin before sleeping; 0 where others need this core to get on.
        deadline_ns: on the clock of :func:`shoal.jit.atomics.now_ns`.
        abandoned: address of a word that is not 0 once waiting is in vain; 0 for none.

    Returns:
        OK, LATE or ABANDONED.
    """
    turns = _RELAXED_TURNS if spin_ns > 0 else 2
    for _ in range(turns):
        if load_acquire(counter) >= target:
            return OK
        relax()
    began = now_ns()
    while True:
        for _ in range(turns):
            if load_acquire(counter) >= target:
                return OK
            relax()
        if abandoned != 0 and load_acquire(abandoned) != 0:
            # Whoever left may have raised the counter before.
            return OK if load_acquire(counter) >= target else ABANDONED
        now = now_ns()
        if now >= deadline_ns:
            return OK if load_acquire(counter) >= target else LATE
        if now - began >= spin_ns:
            longest = deadline_ns - now
            _sleep(counter, target, longest if abandoned == 0 else min(_NAP_NS, longest))


@kernel
def _sleep(counter: int, target: int, length_ns: int) -> None:
    """Sleep until the counter is raised. The mark is made before the last look, the raiser looks for marks
    after it has raised, and a fence lies between on both sides: one of the two sees the other."""
    fetch_add(counter + _SLEEPERS, 1)
    fence()
    seen = load_acquire(counter)
    if seen < target:
        futex_wait(counter, seen, length_ns)
    fetch_add(counter + _SLEEPERS, -1)


@kernel
def raise_counter(counter: int, value: int) -> None:
    """Set the counter, which only this caller raises, and wake whoever sleeps on it."""
    store_release(counter, value)
    wake_sleepers(counter)


@kernel
def wake_sleepers(counter: int) -> None:
    """Wake whoever sleeps on a counter that has just been raised."""
    fence()
    if load_acquire(counter + _SLEEPERS) != 0:
        futex_wake(counter)
