"""The machine's limits are measured: every number is read, and every product is made."""

from __future__ import annotations

import numpy
import pytest

from shoal.bench import roof
from shoal.bench.roof_kernels import CHAINS, multiply_all, read_all
from shoal.jit.team import Team


@pytest.mark.parametrize("threads", [1, 2])
def test_every_number_is_read_once(threads: int) -> None:
    numbers = numpy.arange(64, dtype=numpy.float32)
    results = numpy.zeros(threads, numpy.float32)
    call = numpy.array([numbers.ctypes.data, len(numbers), results.ctypes.data], numpy.int64)
    team = Team(threads)
    try:
        assert team.run(read_all, call.ctypes.data) == 0
    finally:
        team.close()
    share = 64 // threads
    assert results.tolist() == [numbers[n * share : (n + 1) * share].sum() for n in range(threads)]


@pytest.mark.parametrize("repeats", [0, 1, 3])
def test_every_chain_is_computed(repeats: int) -> None:
    numbers, results = numpy.array([0.5], numpy.float32), numpy.zeros(1, numpy.float32)
    call = numpy.array([numbers.ctypes.data, repeats, results.ctypes.data], numpy.int64)
    team = Team(1)
    try:
        assert team.run(multiply_all, call.ctypes.data) == 0
    finally:
        team.close()
    chains = [float(chain) for chain in range(CHAINS)]
    for _ in range(repeats):
        chains = [0.5 * x + 0.5 for x in chains]
    assert results[0] == sum(chains)


def test_limits_are_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(roof, "_PRODUCTS", 1 << 12)
    found = roof.measure_roof(2)
    assert found.threads == 2
    assert found.bytes_per_s > 1e6 and found.flops > 1e6
