"""Policies put to the proof: right ones are used, wrong ones refused with the weight and the error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from shoal.errors import PlanError, UsageError
from shoal.prove import plan_and_prove
from support.planner import Family, bloom, gpt2, llama, opt

LAYERS = "model.layers.*."


def mixtral() -> tuple[type[Any], Any]:
    return T.MixtralForCausalLM, T.MixtralConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        (llama, {"LlamaDecoderLayer": ("self_attn.o_proj", "mlp.down_proj")}),
        (llama, {"*.k_proj": "gather", "lm_head": "replicate"}),
        (llama, {f"{LAYERS}mlp": "gather"}),
        (bloom, {"*.query_key_value": "colwise", "*.dense": "rowwise"}),
        (mixtral, {f"{LAYERS}mlp.experts": "experts"}),
        (mixtral, T.MixtralConfig.base_model_tp_plan),
    ],
)
def test_a_right_policy_proves(family: Family, policy: Any) -> None:
    assert plan_and_prove(*family(), 2, policy=policy).evidence["proved"] is True


@pytest.mark.parametrize(
    ("family", "policy", "what"),
    [
        (llama, {"LlamaDecoderLayer": ("self_attn.q_proj", "mlp.down_proj")}, "self_attn.q_proj as row"),
        (llama, {f"{LAYERS}mlp.down_proj": "column"}, "mlp.down_proj as column"),
        (llama, {f"{LAYERS}mlp.up_proj": "rowwise"}, "mlp.up_proj as row"),
        (llama, {"lm_head": "colwise"}, "lm_head as column"),
        (gpt2, {"GPT2Block": ("attn.c_attn", "mlp.c_proj")}, "attn.c_attn as row"),
        (opt, {"OPTDecoderLayer": ("self_attn.out_proj", "fc1")}, "fc1 as row"),
        (mixtral, {f"{LAYERS}mlp.experts.down_proj": "column"}, "experts.down_proj as column"),
    ],
)
def test_a_wrong_policy_is_refused_with_the_weight_and_the_size_of_the_error(
    family: Family, policy: Any, what: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(what)) as caught:
        plan_and_prove(*family(), 2, policy=policy)
    size = re.search(r"relative error (\S+) where 1e-09 is allowed", str(caught.value))
    assert size is not None and 1e-3 < float(size[1]) < 100


class Halves(nn.Module):
    """Linears whose data flow cannot be measured, since it lets no gradient through."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = torch.relu(self.up(x))
        y: torch.Tensor = self.down(h)
        return y


class Hidden(T.LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Halves(config)


def test_what_cannot_be_measured_is_split_as_the_policy_says_if_that_proves() -> None:
    _, config = llama()
    assert plan_and_prove(Hidden, config, 2).params[f"{LAYERS}mlp.down.weight"].op == "gather"
    plan = plan_and_prove(Hidden, config, 2, policy={"*.mlp.up": "column", "*.mlp.down": "row"})
    assert (plan.params[f"{LAYERS}mlp.up.weight"].op, plan.params[f"{LAYERS}mlp.down.weight"].op) == (
        "column",
        "row",
    )
    assert plan.params[f"{LAYERS}mlp.down.weight"].bias == "once"
    assert plan.evidence["proved"] is True
    assert plan.kv[0].heads == (2, 1)


def test_a_policy_is_part_of_what_a_cached_plan_is_known_by(tmp_path: Path) -> None:
    plain = plan_and_prove(*llama(), 2, tmp_path)
    gathered = plan_and_prove(*llama(), 2, tmp_path, {"*.k_proj": "gather"})
    assert gathered.params != plain.params
    assert len(list(tmp_path.iterdir())) == 2
    assert plan_and_prove(*llama(), 2, tmp_path, {"*.k_proj": "gather"}) == gathered
    assert plan_and_prove(*llama(), 2, tmp_path) == plain


def test_one_rank_checks_a_policys_names_all_the_same() -> None:
    assert plan_and_prove(*llama(), 1, policy={"*.k_proj": "gather"}).params == {}
    with pytest.raises(UsageError, match="kk_proj"):
        plan_and_prove(*llama(), 1, policy={"*.kk_proj": "gather"})
