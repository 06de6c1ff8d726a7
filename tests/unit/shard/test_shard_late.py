"""Sums over ranks that a module around the split weights does."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.local import LocalComm
from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import PlanError
from shoal.plan.slices import slices, zero_names
from shoal.plan.types import Patch, Plan, Reduction, Split, even_ranges
from shoal.shard import shard
from support.mixtures import NEURONS, Model, config_of

BLOCK = "layers.*.mixture"
PARTS = even_ranges(NEURONS, 2)
UP, DOWN = Split("column", 0, NEURONS, PARTS, "split"), Split("row", 1, NEURONS, PARTS, "once")
WEIGHTS = (f"{BLOCK}.experts.*.w2.weight", f"{BLOCK}.shared.w2.weight")
PLAN = Plan(
    tp=2,
    model_class="Model",
    params={
        **{name.replace("w2", "w1"): UP for name in WEIGHTS},
        **dict.fromkeys(WEIGHTS, DOWN),
        f"{BLOCK}.term": Split("once"),
    },
    reductions=(Reduction(BLOCK, 0, WEIGHTS),),
)
IDS = torch.randint(0, 101, (2, 7), generator=torch.Generator().manual_seed(0))


def model_of(**changes: Any) -> nn.Module:
    torch.manual_seed(3)
    model = Model(config_of(**{"bias": True, "shared": True, "term": True, **changes})).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


class FakeComm(LocalComm):
    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_experts_and_what_is_beside_them_are_summed_once_with_every_bias_added_once() -> None:
    whole = model_of()
    expected = whole(IDS)

    def body(comm: SimulatedComm) -> tuple[torch.Tensor, list[Any]]:
        model: Any = copy.deepcopy(whole)
        seen: list[Any] = []
        # A hook that was there before sees what it would see on the whole model.
        model.layers[1].mixture.register_forward_hook(lambda *call: seen.append(call[2]))
        shard(model, PLAN, comm.rank, comm)
        return model(IDS), seen

    seen_whole: list[Any] = []
    watched: Any = copy.deepcopy(whole)
    watched.layers[1].mixture.register_forward_hook(lambda *call: seen_whole.append(call[2]))
    watched(IDS)
    for logits, seen in run_ranks(2, body):
        assert torch.allclose(logits, expected, rtol=1e-10, atol=1e-12)
        assert isinstance(seen[0], tuple)
        assert all(torch.allclose(a, b) for a, b in zip(seen[0], seen_whole[0], strict=True))


def test_ranks_but_the_first_have_zeros_for_what_is_added_once_and_read_none_of_it() -> None:
    names = {name for name, _ in model_of().named_parameters() if "mixture" in name}
    added = {name for name in names if name.endswith(("w2.bias", ".term"))}
    assert zero_names(PLAN, model_of(), 0) == frozenset()
    assert zero_names(PLAN, model_of(), 1) == added
    assert not added & slices(PLAN, model_of(), 1).keys()
    whole = dict(model_of().named_parameters())
    for rank in range(2):
        model = model_of()
        shard(model, PLAN, rank, FakeComm(rank))
        for name in added:
            value = model.get_parameter(name)
            assert torch.equal(value, whole[name] if rank == 0 else torch.zeros_like(value))


def test_on_meta_the_terms_keep_their_shape() -> None:
    model = model_of().to("meta")
    shard(model, PLAN, 1, FakeComm(1))
    assert model.get_parameter("layers.0.mixture.term").shape == (32,)
    assert model.get_parameter("layers.0.mixture.term").is_meta


def test_a_module_of_the_name_that_holds_none_of_the_weights_sums_nothing() -> None:
    model: Any = model_of()
    model.layers[1].mixture = nn.Sequential()  # another kind of layer
    shard(model, PLAN, 0, FakeComm(0))
    assert len(model.layers[0].mixture._forward_hooks) == 1
    assert not model.layers[1].mixture._forward_hooks


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, reductions=(Reduction(f"{BLOCK}.shared", 0, WEIGHTS),)), "lies in no module"),
        (replace(PLAN, reductions=(*PLAN.reductions, Reduction("layers.*", 0, WEIGHTS[:1]))), "twice"),
        (replace(PLAN, params={**PLAN.params, WEIGHTS[1]: Split("replicate")}), "cannot be summed late"),
    ],
)
def test_a_reduction_that_does_not_fit_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        shard(model_of(), plan, 0, FakeComm(0))


def test_an_output_that_is_not_there_is_refused_when_the_module_runs() -> None:
    model = model_of()
    shard(model, replace(PLAN, reductions=(Reduction(BLOCK, 2, WEIGHTS),)), 0, FakeComm(0))
    with pytest.raises(PlanError, match="output 2"):
        model(IDS)


def test_a_term_that_is_tied_to_another_parameter_is_refused() -> None:
    model: Any = model_of()
    model.layers[0].before.bias = model.layers[0].mixture.term
    with pytest.raises(PlanError, match="tied"):
        shard(model, PLAN, 1, FakeComm(1))


def test_a_sharded_model_can_be_copied_and_pickled() -> None:
    model = model_of()
    shard(model, PLAN, 0, FakeComm(0))
    assert torch.equal(copy.deepcopy(model)(IDS), model(IDS))
    again = pickle.loads(pickle.dumps(model))
    with pytest.raises(PlanError, match="shard again"):
        again(IDS)


def test_a_depthwise_convolution_is_cut_with_its_counts() -> None:
    """Its weight and bias are parameters as any other; what its code counts is patched."""
    whole = nn.Sequential(nn.Conv1d(6, 6, 3, groups=6)).double()
    x = torch.randn(2, 6, 9, dtype=torch.float64)
    parts = (((0, 2), (5, 6)), ((2, 5),))
    patches = tuple(
        Patch("*", "Conv1d", attribute, 6, (3, 3)) for attribute in ("groups", "in_channels", "out_channels")
    )
    params = {f"0.{name}": Split("column", 0, 6, parts) for name in ("weight", "bias")}
    for rank, channels in enumerate(([0, 1, 5], [2, 3, 4])):
        part = copy.deepcopy(whole)
        shard(part, Plan(2, "Sequential", params, patches), rank, FakeComm(rank))
        assert torch.allclose(part(x[:, channels]), whole(x)[:, channels])
