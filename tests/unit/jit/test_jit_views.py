"""Memory at an address is read and written as what it is said to be."""

from __future__ import annotations

import numpy
import pytest

from shoal.jit.compile import kernel
from shoal.jit.views import array_at, copy_bytes


@kernel
def double(address: int, count: int, dtype: type) -> None:
    values = array_at(address, count, dtype)
    for index in range(count):
        values[index] += values[index]


@kernel
def copy(target: int, source: int, num_bytes: int) -> None:
    copy_bytes(target, source, num_bytes)


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float64, numpy.int32, numpy.int64, numpy.uint16])
def test_a_view_reads_and_writes_the_elements(dtype: type) -> None:
    memory = numpy.arange(9).astype(dtype)
    double(int(memory[2:].ctypes.data), 5, dtype)
    assert memory.tolist() == [0, 1, 4, 6, 8, 10, 12, 7, 8]


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 4096, 100_001])
def test_a_copy_moves_these_bytes_and_no_others(num_bytes: int) -> None:
    source = numpy.random.default_rng(0).integers(0, 256, num_bytes + 2, dtype=numpy.uint8)
    target = numpy.zeros(num_bytes + 2, numpy.uint8)
    copy(int(target[1:].ctypes.data), int(source[1:].ctypes.data), num_bytes)
    assert numpy.array_equal(target[1:-1], source[1:-1])
    assert target[0] == target[-1] == 0
