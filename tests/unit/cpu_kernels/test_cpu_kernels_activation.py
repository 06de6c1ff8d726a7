"""Activations against torch in float64, over the whole range of floats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from shoal.cpu_kernels.activation import ACTIVATIONS, activate
from shoal.jit.team import Team

FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_equal_torch_in_float64(name: str, team: Team) -> None:
    x = torch.cat([torch.linspace(-30, 30, 100_001), torch.linspace(-1e-3, 1e-3, 1001)])
    expected = FORMULAS[name](x.double())
    tolerance = 1e-6 * (1 + x.abs().double()) if "gelu" in name else 1e-6 * expected.abs() + 1e-30
    assert ((activate(x, name, team) - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_name_means_what_transformers_means_by_it(name: str, team: Team) -> None:
    x = torch.linspace(-8, 8, 999)
    torch.testing.assert_close(activate(x, name, team), ACT2FN[name](x), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_ends_of_the_floats_are_finite_or_what_they_should_be(name: str, team: Team) -> None:
    x = torch.tensor([3e38, -3e38, torch.inf, -torch.inf, 1e-40, -1e-40, 0.0, 88.0, 89.0, -88.0, -104.0])
    got, expected = activate(x, name, team), FORMULAS[name](x.double()).float()
    assert got.isnan().sum() == expected.isnan().sum()
    kept = ~expected.isnan()
    assert torch.allclose(got[kept], expected[kept], rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("name", FORMULAS)
def test_nan_stays_nan_and_alone(name: str, team: Team) -> None:
    x = torch.zeros(40)
    x[[3, 20, 39]] = torch.nan
    got = activate(x, name, team)
    assert got.isnan().nonzero().flatten().tolist() == [3, 20, 39]


@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_a_factor_may_be_the_other_half_of_the_same_buffer(width: int, team: Team) -> None:
    both = torch.randn(7, 2 * width)
    gate, up = both.chunk(2, -1)
    got = activate(gate, "silu", team, factor=up)
    torch.testing.assert_close(got, functional.silu(gate) * up, atol=1e-6, rtol=2e-6)


def test_a_value_has_the_same_bits_wherever_it_stands(team: Team, pair: Team) -> None:
    value = torch.randn(1)
    for name in FORMULAS:
        results = {activate(value, name, team).item()}
        for width in (5, 16, 33):
            for threads in (team, pair):
                results.update(activate(value.expand(9, width).contiguous(), name, threads).unique().tolist())
        assert len(results) == 1, name


def test_activations_work_in_place(team: Team) -> None:
    x = torch.randn(5, 20)
    expected = activate(x, "relu2", team)
    activate(x, "relu2", team, out=x)
    assert torch.equal(x, expected)


def test_an_unknown_name_and_a_factor_that_does_not_fit_are_refused(team: Team) -> None:
    with pytest.raises(ValueError, match="one of"):
        activate(torch.zeros(2, 2), "snake", team)
    with pytest.raises(ValueError, match="factor"):
        activate(torch.zeros(2, 2), "silu", team, factor=torch.zeros(3, 2))
