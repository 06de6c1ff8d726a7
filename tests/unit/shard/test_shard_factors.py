"""Parameters that a module's own code multiplies by, split along what is summed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn
from torch.nn import functional

from shoal.comm.local import LocalComm
from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import PlanError
from shoal.plan.cutting import cut_ranges
from shoal.plan.types import Plan, Split, even_ranges
from shoal.shard import shard
from shoal.shard.factors import FactorOwner, RowFactor
from shoal.shard.link import Link
from shoal.shard.mixing import take_over

Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

IDS = torch.tensor([2, 0, 2, 1])
BIAS = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Stack(nn.Module):
    """Three matrices [5, 6] in one parameter."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 6, dtype=torch.float64), requires_grad=False)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(x, self.weight)


def part_of(whole: Stack, comm: Any, size: int) -> Stack:
    part = copy.deepcopy(whole)
    part.weight = nn.Parameter(cut_ranges(whole.weight, 2, even_ranges(6, size)[comm.rank]), False)
    take_over(part, FactorOwner, Link(comm), row_factors=frozenset({"weight"}))
    return part


USES: dict[str, Use] = {
    "linear": lambda x, w: functional.linear(x, w[1]),
    "linear with bias": lambda x, w: functional.linear(x, w[1], BIAS),
    "linear with bias by name": lambda x, w: functional.linear(x, w[1], bias=BIAS),
    "matmul of a transposed view": lambda x, w: x @ w[torch.tensor(1)].T,
    "product with the weight first": lambda x, w: (w[0] @ x.T).T,
    "rows chosen by numbers": lambda x, w: torch.bmm(w[IDS], x.unsqueeze(-1)).squeeze(-1),
    "einsum": lambda x, w: torch.einsum("th,eoh->teo", x, w),
    "addmm": lambda x, w: torch.addmm(BIAS, x, w[2].t(), beta=2),
    "baddbmm": lambda x, w: torch.baddbmm(BIAS, x.expand(3, *x.shape), w.transpose(1, 2)),
    "method": lambda x, w: x.matmul(w[0].transpose(0, 1).contiguous()),
    "convolution": lambda x, w: functional.conv1d(x[..., None], w[0][..., None], BIAS).squeeze(-1),
    "unbound, cast and reshaped": lambda x, w: x @ w.to(x.dtype).unbind(0)[1].reshape(5, -1).mT,
    "scaled": lambda x, w: functional.linear(x, w[1] * 2 / torch.tensor(3.0)),
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_the_first_product_with_another_tensor_is_summed_once(use: Use, tp: int) -> None:
    whole = Stack(use)
    x = torch.randn(4, 6, dtype=torch.float64)

    def body(comm: SimulatedComm) -> torch.Tensor:
        return part_of(whole, comm, tp)(cut_ranges(x, -1, even_ranges(6, tp)[comm.rank]))

    for result in run_ranks(tp, body):
        assert type(result) is torch.Tensor
        assert torch.allclose(result, whole(x), rtol=1e-12)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: w[0, :4] * x,
        lambda x, w: w[0, :4] + x,
        lambda x, w: torch.matmul(w[0], w[1].T),
        lambda x, w: torch.addmm(w[0, :4, :4], x[:, :2], x[:2, :4]),
        lambda x, w: torch.mm(x, w[0].T, out=torch.empty(4, 5, dtype=torch.float64)),
        lambda x, w: x.copy_(w[0, :4]),
    ],
    ids=["times", "plus", "two factors", "as a term", "out", "copied away"],
)
def test_a_use_that_is_no_product_is_refused(use: Use) -> None:
    part = part_of(Stack(use), LocalComm(), 1)
    with pytest.raises(PlanError, match="split along the features that are summed"):
        part(torch.zeros(4, 6, dtype=torch.float64))


def test_what_is_made_like_a_factor_is_none() -> None:
    part = part_of(Stack(lambda x, w: x), LocalComm(), 1)
    weight: Any = part.weight
    assert isinstance(weight, RowFactor)
    assert type(torch.zeros_like(weight)) is torch.Tensor
    assert type(weight.new_zeros(3)) is torch.Tensor
    assert weight.shape == (3, 5, 6)
    assert weight.dtype == torch.float64
    assert torch.equal(weight, part._parameters["weight"])


def test_the_parameter_itself_stays_plain_and_can_be_replaced_moved_and_written_to() -> None:
    whole = Stack(USES["linear"])
    x = torch.randn(4, 6, dtype=torch.float64)
    part = part_of(whole, LocalComm(), 1)
    assert type(part.state_dict()["weight"]) is torch.Tensor
    assert type(next(part.parameters())) is nn.Parameter
    values = torch.randn(3, 5, 6, dtype=torch.float64)
    part._parameters["weight"] = nn.Parameter(values, requires_grad=False)  # as the loader does
    assert torch.equal(part(x), functional.linear(x, values[1]))
    part.weight.data.copy_(values * 2)
    assert torch.equal(part(x), functional.linear(x, values[1]))
    part.load_state_dict({"weight": values})
    assert part.float()(x.float()).dtype == torch.float32
    assert torch.allclose(part(x.float()).double(), functional.linear(x, values[1]), atol=1e-5)


def test_copies_share_the_group_and_pickles_leave_it_behind() -> None:
    link = Link(LocalComm())
    part = nn.Linear(3, 3)
    take_over(part, FactorOwner, link, row_factors=frozenset({"weight"}))
    twin = copy.deepcopy(part)
    assert type(twin) is type(part)
    assert twin.link is link
    assert torch.equal(twin(torch.ones(1, 3)), part(torch.ones(1, 3)))
    alone = pickle.loads(pickle.dumps(part))
    assert type(alone) is type(part)
    with pytest.raises(PlanError, match="shard again"):
        alone(torch.ones(1, 3))


def xlnet_plan(tp: int, heads: int) -> Plan:
    attention = "transformer.layer.*.rel_attn"
    parts = even_ranges(heads, tp)
    along = {**dict.fromkeys(("q", "k", "v", "r", "seg_embed"), 1)}
    along |= dict.fromkeys(("r_w_bias", "r_r_bias", "r_s_bias"), 0)
    params = {f"{attention}.{name}": Split("column", dim, heads, parts) for name, dim in along.items()}
    return Plan(tp, "XLNetLMHeadModel", {**params, f"{attention}.o": Split("row", 1, heads, parts)})


@pytest.mark.parametrize("tp", [2, 3])
@torch.no_grad()
def test_einsum_weights_of_three_dimensions_are_split_by_head(tp: int) -> None:
    config = T.XLNetConfig(vocab_size=101, d_model=48, n_layer=2, n_head=6, d_inner=64)
    whole = T.XLNetLMHeadModel(config).double().eval()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(0, 101, (2, 7), generator=torch.Generator().manual_seed(0))
    expected = whole(ids).logits

    @torch.no_grad()
    def body(comm: SimulatedComm) -> torch.Tensor:
        model = copy.deepcopy(whole)
        shard(model, xlnet_plan(tp, 6), comm.rank, comm)
        logits: torch.Tensor = model(ids).logits
        return logits

    for logits in run_ranks(tp, body):
        assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-11)
