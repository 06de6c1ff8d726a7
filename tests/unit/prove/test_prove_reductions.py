"""Proofs of plans whose sums are late, and of experts in the way they are computed when served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as T

from shoal.errors import PlanError
from shoal.plan.derive import derive
from shoal.plan.types import Plan, Reduction
from shoal.prove.blame import keep_regions
from shoal.prove.prove import prove
from shoal.prove.simulate import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, random_subject

EXPERTS = "model.layers.*.mlp.experts"


def config_of(**changes: Any) -> Any:
    return T.MixtralConfig(
        **{
            "vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, **changes,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return derive(T.MixtralForCausalLM, config_of(), 2)


def test_a_plan_with_late_sums_is_proved(plan: Plan) -> None:
    assert plan.reductions == (Reduction(EXPERTS, 0, (f"{EXPERTS}.down_proj",)),)
    assert prove(plan, T.MixtralForCausalLM, config_of())["proved"] is True


@pytest.mark.parametrize("module", ["model.layers.*", "model.layers.*.self_attn"])
def test_a_sum_in_the_wrong_module_is_caught(plan: Plan, module: str) -> None:
    wrong = replace(plan, reductions=(replace(plan.reductions[0], module=module),))
    with pytest.raises(PlanError):
        prove(wrong, T.MixtralForCausalLM, config_of())


def test_a_sum_that_is_done_twice_is_refused(plan: Plan) -> None:
    again = Reduction("model.layers.*.mlp", 0, (f"{EXPERTS}.down_proj",))
    with pytest.raises(PlanError, match="twice"):
        prove(replace(plan, reductions=(*plan.reductions, again)), T.MixtralForCausalLM, config_of())


def test_a_region_on_its_own_keeps_only_its_own_late_sums(plan: Plan) -> None:
    attention = next(region.consumer for region in plan.regions if "self_attn" in region.consumer)
    assert keep_regions(plan, [attention]).reductions == ()
    assert keep_regions(plan, [f"{EXPERTS}.down_proj"]).reductions == plan.reductions


def test_experts_are_proved_one_by_one_and_as_they_are_served() -> None:
    runs = random_subject(T.MixtralForCausalLM, config_of()).runs
    ways = [(run.model.dtype, run.model.config._experts_implementation, run.tolerance) for run in runs]
    assert ways == [
        (torch.float64, "eager", FLOAT64_TOLERANCE),
        (torch.float64, "eager", FLOAT64_TOLERANCE),  # with SDPA
        (torch.float32, "grouped_mm", FLOAT32_TOLERANCE),  # which has no float64
    ]
    config = config_of()
    config._experts_implementation = "batched_mm"
    runs = random_subject(T.MixtralForCausalLM, config).runs
    assert [(run.model.dtype, run.model.config._experts_implementation) for run in runs] == [
        (torch.float64, "eager"),
        (torch.float64, "batched_mm"),
    ]
