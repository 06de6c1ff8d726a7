"""The split layers against the whole ones."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.comm.local import LocalComm
from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import PlanError
from shoal.plan.cutting import cut_ranges
from shoal.plan.types import even_ranges
from shoal.shard.layers import Adopter
from shoal.shard.link import Link


class ScaledEmbedding(nn.Embedding):
    """An embedding that computes around its base class, as several families have it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3


class OwnLinear(nn.Linear):
    """A linear with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class ScaledLinear(nn.Linear):
    """A linear that computes around its base class, as a head does that scales its logits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3


def with_part(module: nn.Module, dim: int, ranges: tuple[tuple[int, int], ...]) -> nn.Module:
    """A copy whose weight is the given part."""
    part = copy.deepcopy(module)
    part.weight = nn.Parameter(cut_ranges(part.weight.detach(), dim, ranges))
    return part


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Linear, OwnLinear, ScaledLinear])
def test_row_linear_adds_its_bias_once(kind: type[nn.Linear], bias: bool, tp: int) -> None:
    whole = kind(7, 5, bias=bias).double()
    x = torch.randn(2, 3, 7, dtype=torch.float64)

    def body(comm: SimulatedComm) -> torch.Tensor:
        ranges = even_ranges(7, tp)[comm.rank]
        part = with_part(whole, 1, ranges)
        Adopter(Link(comm)).reduce_outputs(part)
        return part(cut_ranges(x, -1, ranges))

    for result in run_ranks(tp, body):
        assert torch.allclose(result, whole(x), rtol=1e-12)


def test_row_conv1d_keeps_its_layout_and_adds_its_bias_once() -> None:
    whole = Conv1D(5, 7).double()
    nn.init.normal_(whole.bias)
    x = torch.randn(2, 3, 7, dtype=torch.float64)

    def body(comm: SimulatedComm) -> torch.Tensor:
        ranges = even_ranges(7, 2)[comm.rank]
        part = with_part(whole, 0, ranges)
        Adopter(Link(comm)).reduce_outputs(part)
        return part(cut_ranges(x, -1, ranges))

    assert all(torch.allclose(result, whole(x), rtol=1e-12) for result in run_ranks(2, body))


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 7), lambda: ScaledLinear(6, 7), lambda: Conv1D(7, 6)])
@pytest.mark.parametrize("tp", [2, 3])
def test_a_gathered_linear_gives_all_features_in_order(make: Callable[[], nn.Module], tp: int) -> None:
    whole = make().double()
    nn.init.normal_(whole.bias)
    x = torch.randn(4, 6, dtype=torch.float64)
    parts = even_ranges(7, tp)

    def body(comm: SimulatedComm) -> torch.Tensor:
        part = with_part(whole, 1 if isinstance(whole, Conv1D) else 0, parts[comm.rank])
        part.bias = nn.Parameter(cut_ranges(part.bias.detach(), 0, parts[comm.rank]))
        Adopter(Link(comm)).gather_outputs(part, [stop - start for ((start, stop),) in parts])
        return part(x)

    assert all(torch.allclose(result, whole(x), rtol=1e-12) for result in run_ranks(tp, body))


@pytest.mark.parametrize("kind", [nn.Embedding, ScaledEmbedding])
def test_a_split_vocabulary_looks_up_every_id_exactly(kind: type[nn.Embedding]) -> None:
    whole = kind(11, 4, padding_idx=1)
    ids = torch.arange(11).reshape(1, 11)

    def body(comm: SimulatedComm) -> torch.Tensor:
        ranges = even_ranges(11, 3)[comm.rank]
        part = with_part(whole, 0, ranges)
        Adopter(Link(comm)).split_vocabulary(part, ranges[0][0], 11)
        return part(ids)

    assert all(torch.equal(result, whole(ids)) for result in run_ranks(3, body))


@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_id_beyond_a_split_vocabulary_is_an_index_error_as_in_the_whole_table(wrong: int) -> None:
    def body(comm: SimulatedComm) -> None:
        ranges = even_ranges(11, 2)[comm.rank]
        part = with_part(nn.Embedding(11, 4), 0, ranges)
        Adopter(Link(comm)).split_vocabulary(part, ranges[0][0], 11)
        with pytest.raises(IndexError, match="11"):
            part(torch.tensor([[3, wrong]]))

    run_ranks(2, body)


def test_taking_over_keeps_the_module_its_attributes_and_its_kind() -> None:
    module = ScaledEmbedding(4, 2)
    module.note = "kept"
    before = id(module)
    Adopter(Link(LocalComm())).split_vocabulary(module, 0, 4)
    assert id(module) == before
    assert module.note == "kept"
    assert isinstance(module, ScaledEmbedding)
    assert [name for name, _ in module.named_parameters()] == ["weight"]


def test_a_module_is_sharded_once_only() -> None:
    module = nn.Linear(2, 2)
    adopter = Adopter(Link(LocalComm()))
    adopter.reduce_outputs(module)
    with pytest.raises(PlanError, match="already"):
        adopter.gather_outputs(module, [2])
