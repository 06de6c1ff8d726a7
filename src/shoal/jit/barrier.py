"""A barrier of threads or processes over shared memory, for kernels. Knows not what they compute.

The area is ``BARRIER_BYTES`` of zeroed memory, aligned to a cache line: a counter of arrivals that never
goes back, and a word that is not 0 once the barrier is broken.
"""

from __future__ import annotations

from shoal.jit.atomics import fetch_add, load_acquire, store_release
from shoal.jit.compile import kernel
from shoal.jit.waiting import ABANDONED, COUNTER_BYTES, OK, wait_for, wake_sleepers

__all__ = ["BARRIER_BYTES", "break_barrier", "meet", "reset_barrier"]

BARRIER_BYTES = 2 * COUNTER_BYTES
_BROKEN = COUNTER_BYTES  # bytes from the area's start


@kernel
def meet(area: int, count: int, passed: int, spin_ns: int, deadline_ns: int) -> int:
    """Return once ``count`` participants have called it for the same time.

    What each wrote before is seen by all after.

    Args:
        area: address of the barrier's memory.
        passed: how often this participant has met the others before; it counts that itself.
        spin_ns, deadline_ns: see :func:`shoal.jit.waiting.wait_for`.

    Returns:
        OK; LATE if somebody did not come (the barrier is then broken for all); ABANDONED if it is broken.
    """
    if load_acquire(area + _BROKEN) != 0:
        return ABANDONED
    if count == 1:
        return OK
    target = (passed + 1) * count
    if fetch_add(area, 1) + 1 == target:
        wake_sleepers(area)
        return OK
    status = wait_for(area, target, spin_ns, deadline_ns, area + _BROKEN)
    if status != OK:
        break_barrier(area)
    return status


@kernel
def reset_barrier(area: int) -> None:
    """Make it new: nobody has met yet. Only while nobody is in it."""
    store_release(area, 0)
    store_release(area + _BROKEN, 0)


@kernel
def break_barrier(area: int) -> None:
    """Release everybody who waits or will come."""
    store_release(area + _BROKEN, 1)
    wake_sleepers(area)
