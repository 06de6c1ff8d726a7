"""Features, sums, norms and activations are found by numbers, and what only looks alike is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shoal.fuse.match import (
    ACTIVATIONS,
    find_activation,
    find_columns,
    find_gate,
    find_norm,
    find_sum,
    is_close,
)


@pytest.fixture(autouse=True)
def _same_numbers_each_run() -> None:
    torch.manual_seed(0)


def test_columns_are_found_wherever_they_are_and_whatever_their_factor() -> None:
    sources = [torch.randn(19, 7), torch.randn(19, 5)]
    pool = torch.cat(sources, 1)
    order = torch.randperm(12)
    factors = torch.tensor([1.0, -1.0, 0.125] * 4)
    found = find_columns(pool[:, order] * factors, sources)
    assert found is not None
    origin, column, factor = found
    assert torch.equal(origin, (order >= 7).long())
    assert torch.equal(column, torch.where(order >= 7, order - 7, order))
    assert torch.allclose(factor, factors, rtol=1e-5)
    assert bool((factor[factors == 1] == 1).all()), "a factor of one is exactly that"


def test_a_column_that_is_a_mixture_is_found_nowhere() -> None:
    source = torch.randn(19, 7)
    assert find_columns(source[:, :3] + 0.01 * source[:, 3:6], [source]) is None
    assert find_columns(torch.zeros(19, 1), [source]) is None
    assert find_columns(source, []) is None


def test_a_sum_is_found_with_as_few_terms_as_it_has() -> None:
    known = {name: torch.randn(19, 8) for name in ("x", "attention", "mlp", "norm")}
    assert find_sum(known["mlp"], known) == (("mlp", 1.0),)
    terms = find_sum(known["x"] + 0.22 * known["mlp"] - 2 * known["norm"], known)
    assert terms is not None
    assert [name for name, _ in terms] == ["x", "mlp", "norm"]
    assert [factor for _, factor in terms] == pytest.approx([1.0, 0.22, -2.0], rel=1e-5)
    assert terms[0][1] == 1.0


def test_what_is_no_sum_is_none() -> None:
    known = {"x": torch.randn(19, 8), "narrow": torch.randn(19, 4)}
    assert find_sum(known["x"].clamp(-1, 1), known) is None
    assert find_sum(known["x"] * known["x"], known) is None
    assert find_sum(torch.randn(19, 4), {"x": known["x"]}) is None


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm])
def test_norms_of_all_kinds_and_their_eps_are_told_apart(kind: type[nn.Module], eps: float) -> None:
    norm = kind(16, eps=eps)
    for parameter in norm.parameters():
        parameter.data = torch.randn_like(parameter)
    x = torch.randn(19, 16) * 0.01  # so small that the eps counts
    look = find_norm(norm, x, norm(x).detach())
    assert look is not None
    assert look.is_centred == (kind is nn.LayerNorm)
    assert look.adds_one == (kind is GemmaRMSNorm)
    assert look.has_bias == (kind is nn.LayerNorm) and look.has_weight
    assert look.eps == eps and look.width == 16


def test_the_eps_is_found_where_the_module_does_not_say_it() -> None:
    class Hidden(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    x = torch.randn(19, 16) * 0.01
    look = find_norm(Hidden(), x, Hidden()(x).detach())
    assert look is not None and look.eps == 1e-6 and not look.has_weight


def test_a_norm_that_does_something_else_is_none() -> None:
    norm = nn.LayerNorm(16)
    x = torch.randn(19, 16)
    assert find_norm(norm, x, norm(x).detach().clamp(-1, 1)) is None
    assert find_norm(norm, x, norm(x).detach() * 1.001) is None
    assert find_norm(nn.Linear(16, 16), x, x) is None, "a matrix is no norm's weight"


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_each_activation_is_told_from_the_others(name: str) -> None:
    source, up = torch.randn(19, 64) * 3, torch.randn(19, 64)
    assert find_activation(source, ACTIVATIONS[name](source)) == name
    assert find_gate(source, up, ACTIVATIONS[name](source) * up) == name


def test_a_gate_is_not_its_other_half() -> None:
    gate, up = torch.randn(19, 64), torch.randn(19, 64)
    product = torch.nn.functional.silu(gate) * up
    assert find_gate(up, gate, product) is None
    assert find_gate(gate, up[:, :32], product) is None
    assert find_activation(gate, product) is None


def test_what_is_not_a_number_is_close_to_nothing() -> None:
    x = torch.randn(4)
    broken = x.clone()
    broken[0] = float("nan")
    assert is_close(x, x * (1 + 1e-6))
    assert not is_close(broken, x)
    assert not is_close(x, x[:3])
