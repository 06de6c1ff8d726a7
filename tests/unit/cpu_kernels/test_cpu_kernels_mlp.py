"""Fused MLPs against torch."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from shoal.cpu_kernels.layout import STORAGES, pack, unpack
from shoal.cpu_kernels.mlp import GatedMLP, PlainMLP, pack_gated
from shoal.jit.team import Team


def gated(
    gate_up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, activation: str
) -> torch.Tensor:
    """The reference, from weights [2 * I, K] and biases [2 * I] with gate before up."""
    gate, up = (x @ gate_up.T + bias).chunk(2, -1)
    result: torch.Tensor = (ACT2FN[activation](gate) * up) @ down.T
    return result


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("inner", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
def test_a_gated_mlp_equals_torch(inner: int, activation: str, pair: Team) -> None:
    weights, biases = torch.randn(2 * inner, 33), torch.randn(2 * inner)
    down = torch.randn(20, inner)
    packed = pack_gated(*weights.chunk(2), *biases.chunk(2))
    mlp = GatedMLP(packed, pack(down), pair, activation)
    for rows in (1, 6, 7, 40, 200):
        x = torch.randn(rows, 33)
        assert_near(mlp(x), gated(weights, down, x, biases, activation))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_gated_mlp_computes_with_every_storage(storage: str, team: Team) -> None:
    gate, up, down = torch.randn(50, 40), torch.randn(50, 40), torch.randn(30, 50)
    stored = [unpack(pack(weight, storage=storage)) for weight in (gate, up, down)]
    mlp = GatedMLP(pack_gated(gate, up, storage=storage), pack(down, storage=storage), team, "silu")
    x, residual = torch.randn(9, 40), torch.randn(9, 30)
    expected = gated(torch.cat(stored[:2]), stored[2], x, torch.zeros(100), "silu")
    assert_near(mlp(x, residual=residual), expected + residual)


def test_a_plain_mlp_equals_torch(pair: Team) -> None:
    up, up_bias = torch.randn(100, 30), torch.randn(100)
    down, down_bias = torch.randn(30, 100), torch.randn(30)
    mlp = PlainMLP(pack(up, up_bias), pack(down, down_bias), pair, "gelu")
    for rows in (1, 13, 64):
        x = torch.randn(rows, 30)
        inner = torch.nn.functional.gelu(x @ up.T + up_bias)
        assert_near(mlp(x, residual=x), inner @ down.T + down_bias + x)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_two_threads(
    storage: str, team: Team, pair: Team
) -> None:
    gate_up = pack_gated(torch.randn(100, 70), torch.randn(100, 70), storage=storage)
    down = pack(torch.randn(40, 100), torch.randn(40), storage)
    mlps = [GatedMLP(gate_up, down, threads, "silu") for threads in (team, pair)]
    x = torch.randn(200, 70)
    whole = mlps[0](x)
    assert torch.equal(mlps[1](x), whole)
    for start, rows in ((0, 1), (199, 1), (3, 5), (10, 13)):
        assert torch.equal(mlps[1](x[start : start + rows]), whole[start : start + rows])


def test_the_gated_product_stays_inside_its_columns(team: Team) -> None:
    gate_up = pack_gated(torch.randn(17, 8), torch.randn(17, 8))
    mlp = GatedMLP(gate_up, pack(torch.eye(17)), team, "silu")
    assert mlp(torch.randn(3, 2, 8)).shape == (3, 2, 17)


def test_widths_that_do_not_fit_are_refused(team: Team) -> None:
    with pytest.raises(ValueError, match="down takes 40"):
        GatedMLP(pack_gated(torch.randn(16, 8), torch.randn(16, 8)), pack(torch.randn(4, 40)), team, "silu")
    with pytest.raises(ValueError, match="down takes 40, up gives 16"):
        PlainMLP(pack(torch.randn(16, 8)), pack(torch.randn(4, 40)), team, "gelu")
    with pytest.raises(ValueError, match="both with bias"):
        pack_gated(torch.randn(16, 8), torch.randn(16, 8), torch.randn(16))
