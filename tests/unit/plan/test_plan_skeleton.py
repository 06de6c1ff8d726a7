"""Models without their weights, cut to the layers that show every kind."""

from __future__ import annotations

import pytest
import torch
import transformers as T
from torch import nn

from shoal.errors import PlanError
from shoal.plan.random import own_random
from shoal.plan.skeleton import build_on_meta, build_probe, cut_depth, embedding_size
from support.planner import bloom, demo, gpt2, llama


def test_equal_layers_are_cut_to_two() -> None:
    model_class, config = demo()
    cut = cut_depth(model_class, config, build_on_meta(model_class, config))
    assert cut.config.num_hidden_layers == 2
    assert cut.kinds == {"model.layers": (0,) * 30}
    assert config.num_hidden_layers == 30


def test_layers_of_several_kinds_keep_the_first_of_each() -> None:
    """Gemma 3 has five sliding layers before each full one."""
    config = T.Gemma3TextConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=13,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    cut = cut_depth(T.Gemma3ForCausalLM, config, build_on_meta(T.Gemma3ForCausalLM, config))
    assert cut.depths == {"model.layers": 6}
    assert cut.kinds["model.layers"] == (0, 0, 0, 0, 0, 5) * 2 + (0,)


def test_a_depth_that_equals_another_setting_is_still_found() -> None:
    """Six layers and six heads: only the setting that shortens the stack and nothing else is taken."""
    model_class, config = llama(num_hidden_layers=6)
    cut = cut_depth(model_class, config, build_on_meta(model_class, config))
    assert cut.config.num_hidden_layers == 2
    assert cut.config.num_attention_heads == 6


def test_encoder_and_decoder_are_cut_each_on_its_own() -> None:
    config = T.T5Config(
        vocab_size=101, d_model=64, d_kv=16, d_ff=96, num_layers=5, num_decoder_layers=4, num_heads=4
    )
    model_class = T.T5ForConditionalGeneration
    cut = cut_depth(model_class, config, build_on_meta(model_class, config))
    assert cut.depths == {"encoder.block": 2, "decoder.block": 2}


@pytest.mark.parametrize("family", [llama, bloom, gpt2])
def test_a_probe_has_its_weights_on_meta_and_the_rest_random(family: object) -> None:
    model_class, config = family()  # type: ignore[operator]
    model = build_probe(model_class, config)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (parameter.dim() >= 2), name
        if not parameter.is_meta:
            assert parameter.requires_grad
            assert float(parameter.detach().std()) > 0.01, name
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_random_code_draws_from_a_generator_of_its_own() -> None:
    before = torch.get_rng_state()
    with own_random():
        first = (torch.randn(3), torch.rand(2), nn.Linear(3, 2).weight.detach(), torch.empty(2).normal_())
    with own_random():
        second = (torch.randn(3), torch.rand(2), nn.Linear(3, 2).weight.detach(), torch.empty(2).normal_())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_config_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(PlanError, match="vocab_size"):
        embedding_size(T.ViTConfig())
