"""Plans made with a policy: it is followed where it may be, and derived where it is silent or agrees."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as T

from shoal.errors import PlanError
from shoal.plan.asked import ASKED, is_asked, is_left_over
from shoal.plan.derive import derive
from shoal.plan.policy import read_policy
from shoal.plan.types import Plan, even_ranges
from support.planner import Family, bloom, gpt2, llama

LAYERS = "model.layers.*."
ATTENTION = f"{LAYERS}self_attn."


def planned(policy: Any, family: tuple[type[Any], Any] | None = None, tp: int = 2) -> Plan:
    return derive(*(family or llama()), tp, policy=read_policy(policy))


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        (llama, {"LlamaDecoderLayer": ("self_attn.o_proj", "mlp.down_proj")}),
        (llama, T.LlamaConfig.base_model_tp_plan),
        (llama, {"*.q_proj": "column", "*.o_proj": "row"}),
        (gpt2, {"transformer.h.*.attn.c_attn": "column"}),
        (bloom, {"BloomBlock": ("self_attention.dense", "mlp.dense_4h_to_h")}),
    ],
)
def test_where_measuring_agrees_the_derived_plan_is_taken_interleaving_and_all(
    family: Family, policy: Any
) -> None:
    with_policy, without = planned(policy, family()), derive(*family(), 2)
    assert with_policy.params == without.params
    assert with_policy.regions == without.regions


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
@pytest.mark.parametrize("op", ["gather", "replicate"])
def test_a_region_of_which_one_weight_is_asked_to_be_whole_or_gathered_is_gathered(
    name: str, op: str
) -> None:
    plan = planned({f"{ATTENTION}{name}": op})
    assert [region.consumer for region in plan.regions] == [f"{LAYERS}mlp.down_proj.weight"]
    attention = {key.removeprefix(ATTENTION): split for key, split in plan.params.items() if ATTENTION in key}
    asked = attention.pop(f"{name}.weight")
    assert (asked.op, asked.reason) == (op, ASKED)
    assert {split.op for split in attention.values()} == {"gather"}
    assert all(name in split.reason and "the policy" in split.reason for split in attention.values())
    assert plan.kv[0].heads == (3, 3)
    assert not plan.kv[0].is_split


def test_what_every_rank_needs_whole_may_be_asked_to_be_whole_or_column() -> None:
    """A single KV head is on every rank anyhow; transformers' plan calls it column all the same."""
    single = llama(num_key_value_heads=1)
    derived = derive(*single, 2)
    assert derived.params[f"{ATTENTION}k_proj.weight"].op == "replicate"
    for op in ("replicate", "column"):
        plan = planned({f"{ATTENTION}k_proj": op}, single)
        assert plan.regions == derived.regions
        assert plan.params[f"{ATTENTION}k_proj.weight"].op == "replicate"


def test_what_measuring_does_not_confirm_is_cut_as_it_stands_without_patches() -> None:
    plan = planned({f"{LAYERS}mlp.down_proj": "column", f"{LAYERS}mlp.up_proj": "column"})
    down, up = (plan.params[f"{LAYERS}mlp.{name}_proj.weight"] for name in ("down", "up"))
    assert (down.op, down.dim, down.ranges) == ("column", 0, even_ranges(96, 2))
    assert is_asked(down) and not is_left_over(down)
    assert up.op == "column" and is_left_over(up)  # measured to be column, but its region is gone
    assert [region.consumer for region in plan.regions] == [f"{ATTENTION}o_proj.weight"]


def test_small_weights_are_split_if_that_is_asked() -> None:
    plan = planned({"transformer.wpe": "vocab"}, gpt2())
    assert (plan.params["transformer.wpe.weight"].op, plan.params["transformer.wpe.weight"].reason) == (
        "vocab",
        ASKED,
    )


def test_whole_experts_are_dealt_and_summed_in_their_module() -> None:
    config = T.MixtralConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2,
    )  # fmt: skip
    plan = planned({f"{LAYERS}mlp.experts": "experts"}, (T.MixtralForCausalLM, config))
    for name in ("gate_up_proj", "down_proj"):
        split = plan.params[f"{LAYERS}mlp.experts.{name}"]
        assert (split.op, split.dim, split.sizes) == ("experts", 0, (2, 3))
    (reduction,) = plan.reductions
    assert len(reduction.weights) == 2
    with pytest.raises(PlanError, match="5 are fewer than 6 ranks"):
        planned({f"{LAYERS}mlp.experts": "experts"}, (T.MixtralForCausalLM, config), 6)


def test_more_ranks_than_features_is_refused() -> None:
    narrow = llama(hidden_size=12, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(PlanError, match="fewer than 13 parts"):
        planned({f"{ATTENTION}k_proj": "gather"}, narrow, 13)
