"""Stacks of experts split by neuron and dealt out whole, in every way transformers computes them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import PlanError
from shoal.plan.types import Plan, Reduction, Split, even_ranges
from shoal.shard import shard

EXPERTS = 4
WAYS = [
    (torch.float64, "eager", 1e-10),
    (torch.float64, "batched_mm", 1e-10),
    (torch.float32, "eager", 1e-4),
    (torch.float32, "grouped_mm", 1e-4),  # torch has it for float32 and smaller only
]
IDS = torch.randint(0, 101, (2, 7), generator=torch.Generator().manual_seed(0))


def build(model_class: type[Any], config: Any, dtype: torch.dtype, way: str) -> nn.Module:
    config._experts_implementation = way
    model: nn.Module = model_class(config).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return model


def mixtral(dtype: torch.dtype, way: str, neurons: int = 48) -> nn.Module:
    config = T.MixtralConfig(
        vocab_size=101, hidden_size=64, intermediate_size=neurons, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=EXPERTS, num_experts_per_tok=2,
    )  # fmt: skip
    return build(T.MixtralForCausalLM, config, dtype, way)


def gpt_oss(dtype: torch.dtype, way: str) -> nn.Module:
    config = T.GptOssConfig(
        vocab_size=101, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, num_local_experts=EXPERTS,
        num_experts_per_tok=2, sliding_window=16,
    )  # fmt: skip
    return build(T.GptOssForCausalLM, config, dtype, way)


MODELS = {"MixtralForCausalLM": mixtral, "GptOssForCausalLM": gpt_oss}
STACKS = "model.layers.*.mlp.experts"


def mixtral_by_neuron(tp: int, neurons: int = 48) -> Plan:
    """Gate and up one after the other in [experts, 2 * neurons, width]; down in [experts, width, neurons]."""
    parts = even_ranges(neurons, tp)
    both = tuple(((a, b), (neurons + a, neurons + b)) for ((a, b),) in parts)
    params = {
        f"{STACKS}.gate_up_proj": Split("column", 1, 2 * neurons, both),
        f"{STACKS}.down_proj": Split("row", 2, neurons, parts),
    }
    return Plan(tp, "MixtralForCausalLM", params)


def gpt_oss_by_neuron(tp: int) -> Plan:
    """Gate and up in turns in [experts, width, 2 * neurons]; both projections with a bias of each expert."""
    parts = even_ranges(48, tp)
    both = tuple(((2 * a, 2 * b),) for ((a, b),) in parts)
    params = {
        f"{STACKS}.gate_up_proj": Split("column", 2, 96, both),
        f"{STACKS}.gate_up_proj_bias": Split("column", 1, 96, both),
        f"{STACKS}.down_proj": Split("row", 1, 48, parts),
    }
    return Plan(tp, "GptOssForCausalLM", params)


def later(plan: Plan, module: str) -> Plan:
    """Summed in the output of that module; what the experts add is added by rank 0."""
    reduction = Reduction(module, 0, (f"{STACKS}.down_proj",))
    params = {**plan.params, f"{STACKS}.down_proj_bias": Split("once")}
    return replace(plan, params=params, reductions=(reduction,))


def by_expert(model_class: str, tp: int, *parts: tuple[tuple[int, int], ...]) -> Plan:
    names = ["gate_up_proj", "down_proj"]
    if model_class == "GptOssForCausalLM":
        names += [f"{name}_bias" for name in names]
    ranges = parts or even_ranges(EXPERTS, tp)
    return Plan(tp, model_class, {f"{STACKS}.{name}": Split("experts", 0, EXPERTS, ranges) for name in names})


PLANS = {
    "mixtral": mixtral_by_neuron(2),
    "mixtral, three ranks": mixtral_by_neuron(3),
    "mixtral, later": later(mixtral_by_neuron(2), STACKS),
    "mixtral, later still": later(mixtral_by_neuron(3), "model.layers.*.mlp"),
    "gpt_oss": gpt_oss_by_neuron(2),
    "gpt_oss, later": later(gpt_oss_by_neuron(3), STACKS),
    "gpt_oss, later still": later(gpt_oss_by_neuron(2), "model.layers.*.mlp"),
    "mixtral by expert": by_expert("MixtralForCausalLM", 2),
    "mixtral by expert, uneven": by_expert("MixtralForCausalLM", 2, ((0, 1), (3, 4)), ((1, 3),)),
    "gpt_oss by expert": by_expert("GptOssForCausalLM", 3),
    "gpt_oss by expert, later": replace(
        by_expert("GptOssForCausalLM", 2),
        reductions=(Reduction("model.layers.*.mlp", 0, (f"{STACKS}.down_proj",)),),
    ),
}


def outputs(plan: Plan, whole: nn.Module) -> list[tuple[torch.Tensor, int]]:
    """Every rank's logits, and how often it called all_reduce."""

    @torch.no_grad()
    def body(comm: SimulatedComm) -> tuple[torch.Tensor, int]:
        counted: Any = Counting(comm)
        model = copy.deepcopy(whole)
        shard(model, plan, comm.rank, counted)
        return model(IDS).logits, counted.count

    return run_ranks(plan.tp, body)


class Counting:
    """A group that counts sums."""

    def __init__(self, comm: SimulatedComm) -> None:
        self.rank, self.size, self._comm, self.count = comm.rank, comm.size, comm, 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self._comm.all_reduce(tensor)


@pytest.mark.parametrize(("dtype", "way", "tolerance"), WAYS, ids=[f"{d}-{w}" for d, w, _ in WAYS])
@pytest.mark.parametrize("name", PLANS)
@torch.no_grad()
def test_ranks_with_parts_of_the_experts_give_what_the_whole_gives(
    name: str, dtype: torch.dtype, way: str, tolerance: float
) -> None:
    plan = PLANS[name]
    whole = MODELS[plan.model_class](dtype, way)
    expected = whole(IDS).logits
    is_summed_once = bool(plan.reductions) or "by expert" in name
    for logits, count in outputs(plan, whole):
        assert float((logits - expected).abs().max() / expected.abs().max()) < tolerance
        if is_summed_once:
            assert count == 2  # layers


@torch.no_grad()
def test_a_bias_that_every_rank_adds_shows() -> None:
    whole = gpt_oss(torch.float64, "eager")
    plan = later(gpt_oss_by_neuron(2), STACKS)
    del plan.params[f"{STACKS}.down_proj_bias"]  # type: ignore[attr-defined]
    expected = whole(IDS).logits
    assert all(not torch.allclose(logits, expected, rtol=1e-3) for logits, _ in outputs(plan, whole))


@torch.no_grad()
def test_rows_that_grouped_mm_does_not_take_are_computed_one_by_one_on_every_rank() -> None:
    whole = mixtral(torch.float32, "grouped_mm", neurons=20)
    expected = whole(IDS).logits
    for logits, _ in outputs(later(mixtral_by_neuron(3, 20), STACKS), whole):  # 6, 7 and 7 neurons
        assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4
    assert whole.config._experts_implementation == "grouped_mm"


@torch.no_grad()
def test_foreign_tokens_give_exactly_zero() -> None:
    plan = by_expert("MixtralForCausalLM", 2)
    plan = replace(plan, reductions=(Reduction("model.layers.*.mlp", 0, (f"{STACKS}.down_proj",)),))

    def body(comm: SimulatedComm) -> tuple[torch.Tensor, torch.Tensor]:
        model: Any = mixtral(torch.float32, "grouped_mm")
        shard(model, plan, comm.rank, comm)
        experts = model.model.layers[0].mlp.experts
        states = torch.full((3, 64), float("inf"))  # whatever is computed of these shows
        ids = torch.tensor([[2, 3], [3, 2], [2, 2]])
        return experts(states, ids, torch.ones(3, 2)), experts(states[:0], ids[:0], torch.ones(0, 2))

    (mine, nothing), (theirs, _) = run_ranks(2, body)
    assert torch.equal(mine, torch.zeros(3, 64))
    assert not torch.isfinite(theirs).all()
    assert nothing.shape == (0, 64)


class FakeComm:
    rank, size = 0, 2


def refused(model: nn.Module, plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        shard(model, plan, 0, FakeComm())  # type: ignore[arg-type]


class OtherExperts(nn.Module):
    """Experts that are handed no choice."""

    def __init__(self, *arguments: str) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, 3, 3))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states


def test_what_is_no_stack_of_experts_is_not_dealt() -> None:
    split = {"experts.down_proj": Split("experts", 0, EXPERTS, even_ranges(EXPERTS, 2))}
    model = nn.ModuleDict({"experts": OtherExperts()})
    refused(model, Plan(2, "ModuleDict", split), "split them by neuron")
    uneven = by_expert("MixtralForCausalLM", 2)
    params = {**uneven.params, f"{STACKS}.down_proj": Split("experts", 0, EXPERTS, (((0, 1),), ((1, 4),)))}
    refused(mixtral(torch.float32, "eager"), replace(uneven, params=params), "dealt alike")


def test_other_arguments_than_a_choice_of_experts_are_refused() -> None:
    model: Any = mixtral(torch.float32, "eager")
    shard(model, by_expert("MixtralForCausalLM", 2), 0, FakeComm())  # type: ignore[arg-type]
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(PlanError, match="was not called with"):
        experts(torch.zeros(2, 3, 64), torch.zeros(2, 3, 2, dtype=torch.long), torch.zeros(2, 3, 2))
    with pytest.raises(PlanError, match="was not called with"):
        experts(torch.zeros(6, 64), torch.zeros(6, 2), torch.zeros(6, 2))


def test_a_raw_parameter_cannot_be_gathered() -> None:
    split = {f"{STACKS}.down_proj": Split("gather", 0, EXPERTS, even_ranges(EXPERTS, 2))}
    refused(mixtral(torch.float32, "eager"), Plan(2, "MixtralForCausalLM", split), "without a layer")
