"""A module that holds a part of what is split together cannot be called on its own."""

from __future__ import annotations

import pytest
import transformers
from transformers import PreTrainedModel

from shoal.parallel.whole import partial_modules
from shoal.plan.skeleton import build_on_meta
from shoal.plan.types import Plan, Reduction, Region


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2
    )
    return build_on_meta(transformers.LlamaForCausalLM, config)  # type: ignore[return-value]


def region(consumer: str, *producers: str) -> Region:
    path = "model.layers.*."
    names = tuple(f"{path}{name}.weight" for name in producers)
    return Region(f"{path}{consumer}.weight", names, 2, (1, 1), 8, (2,))


ATTENTION = region("self_attn.o_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = region("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj")


def test_producers_and_consumers_alone_are_partial_and_what_holds_both_is_whole(
    model: PreTrainedModel,
) -> None:
    found = partial_modules(model, Plan(2, "LlamaForCausalLM", regions=(ATTENTION, MLP)))
    assert len(found) == 2 * 7
    assert found["model.layers.1.self_attn.q_proj"] == "model.layers.1.self_attn"
    assert found["model.layers.0.mlp.down_proj"] == "model.layers.0.mlp"


def test_what_is_summed_later_is_whole_only_there(model: PreTrainedModel) -> None:
    late = Reduction("model.layers.*", 0, ("model.layers.*.mlp.down_proj.weight",))
    found = partial_modules(model, Plan(2, "LlamaForCausalLM", regions=(MLP,), reductions=(late,)))
    assert found["model.layers.0.mlp"] == found["model.layers.0.mlp.up_proj"] == "model.layers.0"
    assert "model.layers.0" not in found and "model.layers.0.self_attn" not in found


def test_a_region_across_layers_is_whole_where_they_come_together(model: PreTrainedModel) -> None:
    shared = Region("model.layers.*.mlp.down_proj.weight", ("model.embed_tokens.weight",), 2, (1, 1), 8, (2,))
    found = partial_modules(model, Plan(2, "LlamaForCausalLM", regions=(shared,)))
    assert found["model.layers.0"] == found["model.embed_tokens"] == "model"
    assert "model" not in found and "lm_head" not in found
