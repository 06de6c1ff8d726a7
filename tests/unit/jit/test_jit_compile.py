"""Kernels compute what was written, infinities and NaN included."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

from shoal.jit.compile import kernel


@kernel
def sum_of(values: numpy.ndarray) -> float:
    total = 0.0
    for index in range(values.shape[0]):
        total += values[index]
    return total


@kernel(fastmath=False)
def cancelled(large: float, small: float) -> float:
    return (small + large) - large


@kernel(inline="always")
def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator


@kernel
def is_nan(value: float) -> bool:
    return value != value


@kernel
def ratio_twice(numerator: float, denominator: float) -> float:
    return 2 * ratio(numerator, denominator)


def test_a_kernel_sums_as_numpy_does() -> None:
    values = numpy.arange(1000, dtype=numpy.float64)
    assert sum_of(values) == values.sum()


def test_infinities_and_nan_survive_fast_arithmetic() -> None:
    assert sum_of(numpy.array([1.0, -math.inf])) == -math.inf
    assert math.isnan(sum_of(numpy.array([math.inf, -math.inf, 1.0])))
    assert is_nan(math.nan)
    assert not is_nan(math.inf)


def test_without_fast_arithmetic_operations_keep_their_order() -> None:
    assert cancelled(1e20, 1.0) == 0.0


def test_a_division_by_zero_is_an_infinity_as_in_numpy() -> None:
    assert ratio_twice(1.0, 0.0) == math.inf


def test_an_inlined_kernel_gives_what_a_called_one_gives() -> None:
    assert ratio_twice(1.0, 4.0) == 2 * ratio(1.0, 4.0) == 0.5


def test_an_unknown_way_to_inline_is_refused() -> None:
    wrong: Any = "sometimes"
    with pytest.raises(ValueError, match="sometimes"):
        kernel(inline=wrong)
