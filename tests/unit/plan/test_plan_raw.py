"""Parameters that a model's own code multiplies by: stacked experts, einsum, a weight used by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as T

from shoal.plan.cones import Consumer
from shoal.plan.derive import derive
from shoal.plan.naming import Naming
from shoal.plan.skeleton import build_probe
from shoal.plan.survey import data_flow
from shoal.plan.types import Plan, total
from shoal.prove import plan_and_prove

_DECODER: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def mixtral() -> tuple[type[Any], Any]:
    return T.MixtralForCausalLM, T.MixtralConfig(**_DECODER)


def gpt_oss() -> tuple[type[Any], Any]:
    return T.GptOssForCausalLM, T.GptOssConfig(**_DECODER, head_dim=16)


def xlnet() -> tuple[type[Any], Any]:
    return T.XLNetLMHeadModel, T.XLNetConfig(
        vocab_size=101, d_model=64, n_layer=2, n_head=4, d_inner=96, pad_token_id=0
    )


def mamba() -> tuple[type[Any], Any]:
    return T.MambaForCausalLM, T.MambaConfig(
        vocab_size=101, hidden_size=64, num_hidden_layers=2, state_size=8, pad_token_id=0
    )


def whole(plan: Plan) -> dict[str, str]:
    """What is not split, with the reason."""
    return {name: split.reason for name, split in plan.params.items() if not split.is_split}


def test_stacked_experts_are_split_by_neuron_halves_and_all() -> None:
    plan = plan_and_prove(*mixtral(), 3)
    up = plan.params["model.layers.*.mlp.experts.gate_up_proj"]
    down = plan.params["model.layers.*.mlp.experts.down_proj"]
    assert (up.op, up.dim, up.size) == ("column", 1, 192)
    assert (down.op, down.dim, down.size) == ("row", 2, 96)
    for own, neurons in zip(up.ranges, down.ranges, strict=True):
        ((start, stop),) = neurons
        assert own == ((start, stop), (96 + start, 96 + stop))
    assert not whole(plan)


def test_interleaved_experts_take_their_biases_with_them() -> None:
    plan = plan_and_prove(*gpt_oss(), 2)
    experts = "model.layers.*.mlp.experts"
    up, bias = plan.params[f"{experts}.gate_up_proj"], plan.params[f"{experts}.gate_up_proj_bias"]
    assert (up.op, up.dim) == ("column", 2)
    assert (bias.op, bias.dim, bias.ranges) == ("column", 1, up.ranges)
    assert all(start % 2 == stop % 2 == 0 for ((start, stop),) in up.ranges)
    assert plan.params[f"{experts}.down_proj"].dim == 1


@pytest.mark.parametrize("tp", [2, 3])
def test_an_attention_written_with_einsum_is_split_by_heads(tp: int) -> None:
    plan = plan_and_prove(*xlnet(), tp)
    own = {name: plan.params[f"transformer.layer.*.rel_attn.{name}"] for name in "qkvro"}
    assert {name: split.op for name, split in own.items()} == {
        "q": "column", "k": "column", "v": "column", "r": "column", "o": "row",
    }  # fmt: skip
    assert all((split.dim, split.size) == (1, 4) for split in own.values())
    assert len({split.ranges for split in own.values()}) == 1
    bias = plan.params["transformer.layer.*.rel_attn.r_w_bias"]
    assert (bias.op, bias.dim, bias.ranges) == ("column", 0, own["q"].ranges)


def test_a_state_space_mixer_is_split_by_channel_with_its_convolution() -> None:
    plan = plan_and_prove(*mamba(), 3)
    mixer = "backbone.layers.*.mixer"
    operations = {
        name: plan.params[f"{mixer}.{name}"].op
        for name in ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight")
    }
    assert operations == {
        "in_proj.weight": "column", "x_proj.weight": "row", "dt_proj.weight": "column",
        "out_proj.weight": "row",
    }  # fmt: skip
    channels = plan.params[f"{mixer}.out_proj.weight"].ranges
    for name in ("A_log", "D", "conv1d.weight", "conv1d.bias", "dt_proj.weight"):
        split = plan.params[f"{mixer}.{name}"]
        assert (split.op, split.dim, split.ranges) == ("column", 0, channels)
    assert sum(total(ranges) for ranges in plan.params[f"{mixer}.in_proj.weight"].ranges) == 256
    assert {region.consumer for region in plan.regions} == {
        f"{mixer}.x_proj.weight", f"{mixer}.out_proj.weight",
    }  # fmt: skip


def consumer_of(model_class: type[Any], config: Any, pattern: str) -> Consumer:
    flow = data_flow(build_probe(model_class, config), config, Naming())
    return next(consumer for consumer in flow.consumers if consumer.call.pattern == pattern)


def test_experts_with_few_tokens_are_measured_together() -> None:
    """16 experts for a few tokens each: the features of no neuron are left unknown."""
    config = T.MixtralConfig(**{**_DECODER, "num_local_experts": 16, "hidden_act": "relu"})
    consumer = consumer_of(T.MixtralForCausalLM, config, "model.layers.*.mlp.experts.down_proj")
    cone = consumer.cones["model.layers.*.mlp.experts.gate_up_proj"]
    assert len(consumer.calls) > 1
    assert bool(cone.reaches.float().mean() > 0.95)
    assert cone.sizes() == [1]


def test_a_table_that_code_slices_by_itself_does_not_keep_attention_from_being_split() -> None:
    config = T.DebertaV2Config(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, relative_attention=True, pos_att_type="c2p|p2c",
        max_relative_positions=16, share_att_key=False, position_biased_input=False, type_vocab_size=0,
    )  # fmt: skip
    plan = derive(T.DebertaV2ForMaskedLM, config, 2)
    layer = "deberta.encoder.layer.*.attention"
    assert plan.params[f"{layer}.output.dense.weight"].op == "row"
    assert plan.params[f"{layer}.self.pos_key_proj.weight"].op == "column"
    assert plan.params["deberta.encoder.rel_embeddings.weight"].op == "replicate"


def test_planning_leaves_what_is_no_factor_with_values_and_factors_without() -> None:
    model_class, config = gpt_oss()
    model = build_probe(model_class, config)
    data_flow(model, config, Naming())
    experts = model.get_submodule("model.layers.0.mlp.experts")
    assert not experts.get_parameter("gate_up_proj_bias").is_meta
    assert experts.get_parameter("gate_up_proj").is_meta
    assert isinstance(experts.get_parameter("down_proj"), torch.nn.Parameter)
