"""What the machine can do at a number of threads: bytes read from memory and float32 operations a second.
Knows no model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

__all__ = ["Roof", "measure_roof"]

_READ_BYTES = 1 << 29  # far more than any cache holds
_PRODUCTS = 1 << 22  # in each lane of each chain: some tens of milliseconds
_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Roof:
    """The best that was seen."""

    threads: int
    bytes_per_s: float  # read from memory, one after the other
    flops: float  # float32 operations a second, in registers; a product and a sum are two


def measure_roof(threads: int) -> Roof:
    """Measure it, in about a second.

    Args:
        threads: that read and compute.
    """
    import numpy

    from shoal.bench.roof_kernels import CHAINS, multiply_all, read_all
    from shoal.cpu_kernels.attention_ir import host_lanes
    from shoal.jit.team import Team

    numbers = numpy.full(_READ_BYTES // 4, 0.5, numpy.float32)
    results = numpy.zeros(threads, numpy.float32)

    def fastest_s(job: Any, count: int) -> float:
        call = numpy.array([numbers.ctypes.data, count, results.ctypes.data], numpy.int64)
        taken = []
        for _ in range(1 + _REPEATS):  # the first one compiles
            started = time.perf_counter()
            team.run(job, call.ctypes.data)
            taken.append(time.perf_counter() - started)
        return min(taken)

    team = Team(threads)
    try:
        bytes_per_s = _READ_BYTES / fastest_s(read_all, len(numbers))
        operations = 2 * _PRODUCTS * CHAINS * host_lanes() * threads
        return Roof(threads, bytes_per_s, operations / fastest_s(multiply_all, _PRODUCTS))
    finally:
        team.close()
