"""Elementary functions in units of their last place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numba import types
from numba.extending import intrinsic

from shoal.cpu_kernels.elementary import Vector, error_function, exponential, hyperbolic_tangent
from shoal.cpu_kernels.emit import PANEL, instruction, load_vector, store_vector
from shoal.jit.compile import kernel

FUNCTIONS = {0: exponential, 1: hyperbolic_tangent, 2: error_function}


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _apply(typing: Any, number: Any, address: Any) -> Any:
    function = FUNCTIONS[number.literal_value]

    def emit(builder: Any, a: Any) -> None:
        store_vector(builder, function(Vector(builder, load_vector(builder, a[1]))).value, a[1])

    return instruction(types.void(number, types.int64), emit)


@kernel(fastmath=False)
def _apply_to_all(number: int, address: int, count: int) -> None:
    for start in range(0, count, PANEL):
        if number == 0:
            _apply(0, address + 4 * start)
        elif number == 1:
            _apply(1, address + 4 * start)
        else:
            _apply(2, address + 4 * start)


def apply(number: int, x: torch.Tensor) -> torch.Tensor:
    """A function of 16 n values."""
    result = x.clone()
    _apply_to_all(number, result.data_ptr(), x.numel())
    return result


def test_the_exponential_is_within_two_units_in_the_last_place() -> None:
    x = torch.linspace(-87.3, 88.7, 1_000_000)
    expected = x.double().exp()
    assert ((apply(0, x) - expected).abs() <= 2 * 2.0**-24 * expected).all()


def test_the_exponential_reaches_denormals_zero_and_infinity() -> None:
    x = torch.tensor([-200.0, -104.0, -100.0, -90.0, 88.8, 1000.0, torch.inf, -torch.inf] * 2)
    expected = x.double().exp().float()
    torch.testing.assert_close(apply(0, x), expected, atol=3e-45, rtol=3e-7)


def test_the_hyperbolic_tangent_keeps_its_relative_error_near_zero() -> None:
    x = torch.cat([torch.linspace(-12, 12, 100_000), torch.logspace(-38, 1, 100_000)])
    expected = x.double().tanh()
    assert ((apply(1, x) - expected).abs() <= 4 * 2.0**-24 * expected.abs() + 1e-45).all()


def test_the_error_function_is_within_five_ten_millionths() -> None:
    x = torch.linspace(-6, 6, 100_000)
    assert (apply(2, x) - x.double().erf()).abs().max() <= 5e-7


@pytest.mark.parametrize("number", FUNCTIONS)
def test_nan_stays_in_its_lane(number: int) -> None:
    x = torch.zeros(PANEL)
    x[5] = torch.nan
    assert apply(number, x).isnan().nonzero().flatten().tolist() == [5]
