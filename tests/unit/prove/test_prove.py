"""Proofs: right plans hold, and every kind of wrong one is caught."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.derive import derive
from shoal.plan.types import Plan, Split, even_ranges
from shoal.prove import prove
from shoal.prove.clone import find_clone
from shoal.prove.simulate import run_plan
from shoal.prove.substitute import substitute
from support.planner import FAMILIES, Family, bloom, demo, gpt2, gpt_neox, llama, opt


@pytest.mark.parametrize("tp", [3, *(pytest.param(tp, marks=pytest.mark.full) for tp in (2, 4))])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_derived_plans_of_every_family_hold(family: str, tp: int) -> None:
    model_class, config = FAMILIES[family]()
    evidence = prove(derive(model_class, config, tp), model_class, config)
    assert evidence["proved"] is True
    assert evidence["proof_decode"] is True
    assert evidence["proof_attention"] in ("eager sdpa", "eager")
    assert isinstance(evidence["relative_error"], float)
    assert evidence["relative_error"] <= 1e-9


@pytest.mark.parametrize("tp", [2, 3, 4, 5])
def test_the_demo_models_plan_is_proved_on_a_small_model(tp: int) -> None:
    model_class, config = demo()
    evidence = prove(derive(model_class, config, tp), model_class, config)
    assert int(evidence["proof_elements"]) < 1_000_000
    assert float(evidence["relative_error"]) <= 1e-9


def wrong(family: Family, change: Callable[[Plan], Plan], tp: int = 2) -> float:
    """The relative error of a plan made wrong after it was derived, by numbers alone."""
    model_class, config = family()
    plan = derive(model_class, config, tp)
    clone = find_clone(plan, model_class, config)
    assert run_plan(substitute(plan, clone.small), clone.subject) <= clone.subject.tolerance
    return run_plan(substitute(change(plan), clone.small), clone.subject)


def change_split(plan: Plan, name: str, **changes: Any) -> Plan:
    pattern = next(pattern for pattern in plan.params if name in pattern)
    return replace(plan, params={**plan.params, pattern: replace(plan.params[pattern], **changes)})


@pytest.mark.parametrize("family", [gpt2])
def test_a_contiguous_cut_of_a_stacked_fused_projection_is_caught(family: Family) -> None:
    assert wrong(family, lambda plan: change_split(plan, "c_attn", ranges=even_ranges(288, 2))) > 1e-3


@pytest.mark.parametrize("family", [gpt_neox, bloom])
def test_a_cut_of_an_interleaved_fused_projection_as_if_it_were_stacked_is_caught(family: Family) -> None:
    def stacked(plan: Plan) -> Plan:
        pattern = next(pattern for pattern in plan.params if "query_key_value" in pattern)
        third = plan.params[pattern].size // 3
        half = third // 2
        ranges = tuple(
            tuple((part * third + rank * half, part * third + (rank + 1) * half) for part in range(3))
            for rank in range(2)
        )
        return change_split(plan, "query_key_value", ranges=ranges)

    assert wrong(family, stacked) > 1e-3


def test_the_structure_half_of_the_proof_catches_a_wrong_cut_too() -> None:
    model_class, config = gpt2()
    plan = change_split(derive(model_class, config, 2), "c_attn", ranges=even_ranges(288, 2))
    with pytest.raises(PlanError, match="c_attn"):
        prove(plan, model_class, config)


def test_a_wrong_alibi_slice_is_caught() -> None:
    def swapped(plan: Plan) -> Plan:
        return replace(plan, args=tuple(replace(a, ranges=a.ranges[::-1]) for a in plan.args))

    assert wrong(bloom, swapped) > 1e-6


def test_a_missing_alibi_slice_is_caught() -> None:
    with pytest.raises(PlanError):
        wrong(bloom, lambda plan: replace(plan, args=()))


def test_swapped_kv_heads_are_caught() -> None:
    def swapped(plan: Plan) -> Plan:
        pattern = next(pattern for pattern in plan.params if "k_proj" in pattern)
        ranges = plan.params[pattern].ranges[::-1]
        return change_split(plan, "k_proj", ranges=ranges)

    assert wrong(lambda: llama(num_attention_heads=6, num_key_value_heads=2), swapped) > 1e-3


def test_a_missing_integer_is_caught() -> None:
    with pytest.raises(PlanError, match="fails"):
        wrong(opt, lambda plan: replace(plan, patches=()))


def break_first(kind: str, attribute: str, value: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    """Change an attribute of the first sharded module of a kind."""

    def prepare(model: nn.Module) -> None:
        module = next(module for module in model.modules() if type(module).__name__ == kind)
        setattr(module, attribute, value(module))

    return prepare


def bias_every_time(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = module.comm.all_reduce(nn.functional.linear(x, module.weight, module.bias))
        return product

    return forward


def no_reduction(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: nn.functional.linear(x, module.weight, module.bias)


@pytest.mark.parametrize(
    ("kind", "attribute", "value"),
    [
        ("RowLinear", "forward", bias_every_time),
        ("RowLinear", "forward", no_reduction),
        ("VocabEmbedding", "start", lambda module: module.start + 1),
        ("GatheredLinear", "bias", lambda module: nn.Parameter(torch.ones(module.weight.shape[0]).double())),
    ],
    ids=["bias n times", "no reduction", "wrong vocabulary rows", "foreign bias"],
)
def test_a_broken_layer_is_caught(kind: str, attribute: str, value: Callable[[Any], Any]) -> None:
    model_class, config = opt()
    plan = derive(model_class, config, 2)
    clone = find_clone(plan, model_class, config)
    broken = break_first(kind, attribute, value)
    try:
        error = run_plan(substitute(plan, clone.small), clone.subject, broken)
    except PlanError:
        return
    assert error > 1e-6


def test_an_untied_head_is_caught() -> None:
    """A head that no longer shares the embedding's rows, as a loader that forgets the tie would make it."""
    model_class, config = llama(tie_word_embeddings=True)
    plan = derive(model_class, config, 2)
    clone = find_clone(plan, model_class, config)

    def untie(model: nn.Module) -> None:
        head: Any = model.lm_head
        head.weight = nn.Parameter(torch.randn_like(head.weight), requires_grad=False)

    assert run_plan(substitute(plan, clone.small), clone.subject, untie) > 1e-3


def test_ranks_that_disagree_are_caught() -> None:
    """One rank's error is enough."""
    model_class, config = llama()
    plan = derive(model_class, config, 2)
    clone = find_clone(plan, model_class, config)

    def on_rank_one(model: nn.Module) -> None:
        head: Any = model.lm_head
        if head.comm.rank == 1:
            head.sizes, gather = (0,), head.comm.all_gather
            sizes = plan_sizes(clone.small.lm_head.weight.shape[0])
            head.comm.all_gather = lambda x, _, dim=-1: gather(x, sizes, dim) * 1.5

    assert run_plan(substitute(plan, clone.small), clone.subject, on_rank_one) > 1e-3


def plan_sizes(size: int) -> tuple[int, ...]:
    return tuple(stop - start for ((start, stop),) in even_ranges(size, 2))


def test_a_plan_for_another_class_is_refused() -> None:
    model_class, config = llama()
    plan = replace(derive(model_class, config, 2), model_class="OtherForCausalLM")
    with pytest.raises(PlanError, match="OtherForCausalLM"):
        prove(plan, model_class, config)


def test_one_rank_needs_no_proof() -> None:
    model_class, config = llama()
    assert prove(Plan(1, model_class.__name__), model_class, config)["proved"] is True


def test_a_proof_touches_neither_config_nor_random_state() -> None:
    model_class, config = bloom()
    plan = derive(model_class, config, 2)
    attributes, state = copy.deepcopy(vars(config)), torch.get_rng_state()
    prove(plan, model_class, config)
    assert vars(config) == attributes
    assert torch.equal(torch.get_rng_state(), state)


def test_an_all_gathered_plan_holds() -> None:
    model_class, config = llama()
    plan = derive(model_class, config, 2)
    excluded = frozenset(region.consumer for region in plan.regions)
    gathered = derive(model_class, config, 2, excluded)
    assert not gathered.regions
    assert {split.op for split in gathered.params.values()} == {"gather", "vocab"}
    assert isinstance(gathered.params["lm_head.weight"], Split)
    assert prove(gathered, model_class, config)["proved"] is True
