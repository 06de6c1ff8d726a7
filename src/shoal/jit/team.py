"""A team of threads that runs one kernel at a time, every thread its part. Knows no kernel.

The caller of :meth:`Team.run` is participant 0. The others wait for a job inside a compiled loop, without
the GIL: they spin, then sleep until woken, so that an idle team uses no time. What a job is, and
how it ends, passes through a small memory area; nothing is allocated per run.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoal.jit.atomics import fetch_add, load_acquire, store_release
from shoal.jit.barrier import BARRIER_BYTES, break_barrier, reset_barrier
from shoal.jit.compile import kernel
from shoal.jit.waiting import COUNTER_BYTES, FOREVER, raise_counter, wait_for, wake_sleepers

__all__ = ["Job", "Team", "aligned_zeros", "available_cores", "job_address"]

Job = Callable[[int, int, int], int]
"""A kernel ``part(index, count, arguments_address) -> status``: part ``index`` of ``count`` of the work."""

_log = logging.getLogger("shoal.jit")

# About what it takes to wake a sleeper: so waiting never takes more than twice of what it could have.
_SPIN_NS = 50_000

# The area, in bytes from its start: runs begun and parts done (counters), the job, the barrier, the statuses.
_BEGUN, _DONE, _JOB = 0, COUNTER_BYTES, 2 * COUNTER_BYTES
_ARGUMENTS = _JOB + 8
_BARRIER = 3 * COUNTER_BYTES
_STATUS = _BARRIER + BARRIER_BYTES


class Team:
    """Threads that share the work of a kernel.

    A job may let its parts meet by ``meet(barrier_address, count, passed, spin_ns, FOREVER)``
    (:mod:`shoal.jit.barrier`), with ``passed`` counted from 0 in each run. A part that returns a status other
    than 0 breaks the barrier, so that the others are not left waiting.

    Args:
        num_threads: participants, the caller of :meth:`run` among them.
        cpus: a core for each participant; participants 1 and up are pinned to theirs (participant 0 is
            whatever thread calls, which pins itself). None pins nothing.
        spin_ns: how long a thread spins for the next job before it sleeps. None: 50 microseconds,
            or 0 where the process may use fewer cores than the team has threads.

    Raises:
        ValueError: no thread at all, or not one core a participant.
    """

    def __init__(
        self, num_threads: int, cpus: Sequence[int] | None = None, spin_ns: int | None = None
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads: at least 1, got {num_threads}")
        if cpus is not None and len(cpus) != num_threads:
            raise ValueError(f"cpus: one a thread, {num_threads}, got {list(cpus)}")
        if cpus is not None and not hasattr(os, "sched_setaffinity"):
            _log.info("threads are not pinned: this system has no call for it")
            cpus = None
        self.num_threads = num_threads
        self.spin_ns = spin_ns if spin_ns is not None else _SPIN_NS * (num_threads <= available_cores())
        self._area = aligned_zeros(_STATUS + num_threads * COUNTER_BYTES)
        self._address = int(self._area.ctypes.data)
        self._lock = threading.Lock()
        self._addresses: dict[Any, int] = {}
        self._threads = tuple(
            threading.Thread(
                target=_participate,
                args=(self._area, index, num_threads, self.spin_ns, None if cpus is None else cpus[index]),
                name=f"shoal-team-{index}",
                daemon=True,  # the interpreter's end does not wait for them; the finalizer lets them go
            )
            for index in range(1, num_threads)
        )
        self._finalizer = weakref.finalize(self, _dismiss, self._area, self._threads)
        for thread in self._threads:
            thread.start()

    @property
    def barrier_address(self) -> int:
        """Where the parts of a job may meet."""
        return self._address + _BARRIER

    def run(self, job: Job | int, arguments_address: int) -> int:
        """Run a job on all threads and return once all parts are done.

        Args:
            job: the kernel, or its address (:func:`job_address`).
            arguments_address: handed to every part as it is; what lies there must live until the return.

        Returns:
            0, or the status of the lowest participant that did not return 0.

        Raises:
            ValueError: the team is closed.
        """
        address = job if isinstance(job, int) else self._addresses.get(job)
        if address is None:
            address = self._addresses[job] = job_address(job)
        with self._lock:
            if not self._finalizer.alive:
                raise ValueError("the team of threads is closed")
            return _run(self._address, self.num_threads, self.spin_ns, address, arguments_address)

    def close(self) -> None:
        """Let the threads go, and wait until they have gone. May be called again."""
        with self._lock:
            self._finalizer()


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def job_address(job: Any) -> int:
    """The machine address of a kernel as ``int64 (*)(int64, int64, int64)``; compiles it if need be.

    It stays valid while ``job`` lives.

    Raises:
        TypeError: it does not return an integer of 64 bits.
    """
    signature = (types.int64, types.int64, types.int64)
    job.compile(signature)
    result = job.overloads[signature]
    if types.unliteral(result.signature.return_type) != types.int64:
        raise TypeError(f"a job returns an int64 status, {job.__qualname__}: {result.signature.return_type}")
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


def aligned_zeros(num_bytes: int) -> Any:
    """Zeroed memory whose start is that of a cache line, as a numpy array of bytes."""
    block = numpy.zeros(num_bytes + COUNTER_BYTES, numpy.uint8)
    start = -block.ctypes.data % COUNTER_BYTES
    return block[start : start + num_bytes]


def _participate(area: Any, index: int, count: int, spin_ns: int, cpu: int | None) -> None:
    """A thread's life. ``area`` is held here too: it must outlive the loop."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})  # this thread alone
    _serve(int(area.ctypes.data), index, count, spin_ns)


def _dismiss(area: Any, threads: Sequence[threading.Thread]) -> None:
    _send_home(int(area.ctypes.data))
    for thread in threads:
        thread.join()


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, job: Any, index: Any, count: Any, arguments: Any) -> Any:
    """``_call(job, index, count, arguments) -> int64``: call the function at an address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        function = builder.inttoptr(values[0], ir.FunctionType(word, [word] * 3).as_pointer())
        return builder.call(function, values[1:])

    return types.int64(*[types.int64] * 4), generate


@kernel
def _part(area: int, index: int, count: int, job: int, arguments: int) -> None:
    status = _call(job, index, count, arguments)
    store_release(area + _STATUS + index * COUNTER_BYTES, status)
    if status != 0:
        break_barrier(area + _BARRIER)


@kernel
def _serve(area: int, index: int, count: int, spin_ns: int) -> None:
    """Take part in one run after the other, until the job is 0."""
    runs = 0
    while True:
        runs += 1
        wait_for(area + _BEGUN, runs, spin_ns, FOREVER, 0)
        job = load_acquire(area + _JOB)
        if job == 0:
            return
        _part(area, index, count, job, load_acquire(area + _ARGUMENTS))
        if fetch_add(area + _DONE, 1) + 1 == runs * (count - 1):
            wake_sleepers(area + _DONE)


@kernel
def _run(area: int, count: int, spin_ns: int, job: int, arguments: int) -> int:
    runs = load_acquire(area + _BEGUN) + 1
    reset_barrier(area + _BARRIER)
    store_release(area + _JOB, job)
    store_release(area + _ARGUMENTS, arguments)
    raise_counter(area + _BEGUN, runs)
    _part(area, 0, count, job, arguments)
    wait_for(area + _DONE, runs * (count - 1), spin_ns, FOREVER, 0)
    status = 0
    for index in range(count):
        status = load_acquire(area + _STATUS + index * COUNTER_BYTES)
        if status != 0:
            break
    return status


@kernel
def _send_home(area: int) -> None:
    store_release(area + _JOB, 0)
    raise_counter(area + _BEGUN, load_acquire(area + _BEGUN) + 1)
