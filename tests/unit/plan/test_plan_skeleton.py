"""Models without their weights, cut to the layers that show every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from shoal.errors import PlanError
from shoal.plan.random import own_random
from shoal.plan.skeleton import (
    build_on_meta,
    build_probe,
    build_with_generator,
    cut_depth,
    embedding_size,
    shorten_lengths,
)
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


def test_a_model_that_reads_characters_names_no_vocabulary() -> None:
    assert embedding_size(T.CanineConfig()) == 128


def depths(model_class: type[nn.Module], config: Any) -> dict[str, int]:
    return cut_depth(model_class, config, build_on_meta(model_class, config)).depths


def test_a_head_with_features_for_every_layer_does_not_keep_the_depth() -> None:
    config = T.EsmConfig(
        vocab_size=33, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        position_embedding_type="rotary", mask_token_id=32, pad_token_id=1,
    )  # fmt: skip
    assert depths(T.EsmForMaskedLM, config) == {"esm.encoder.layer": 2}


def test_stacks_counted_in_inner_configs_are_cut_each_by_its_own_counter() -> None:
    inner = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 8, "vocab_size": 101, "num_hidden_layers": 6}  # fmt: skip
    config = T.T5GemmaConfig(encoder=inner, decoder=inner, vocab_size=101)
    assert set(depths(T.T5GemmaForConditionalGeneration, config).values()) == {2}


def test_stacks_that_share_a_counter_keep_what_the_neediest_needs() -> None:
    class Two(T.LlamaForCausalLM):
        """Beside the layers, as many linears, of which the fourth is another."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            sizes = [16 if index == 3 else 8 for index in range(config.num_hidden_layers)]
            self.extra = nn.ModuleList(nn.Linear(8, size) for size in sizes)

    _, config = llama(num_hidden_layers=7)
    assert depths(Two, config) == {"model.layers": 4, "extra": 4}


def test_blocks_and_windows_become_short_and_widths_stay() -> None:
    config = T.BigBirdPegasusConfig(
        vocab_size=101, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, block_size=64,
    )  # fmt: skip
    short = shorten_lengths(T.BigBirdPegasusForConditionalGeneration, config)
    assert (short.block_size, short.d_model, config.block_size) == (8, 32, 64)
    config.encoder_attention_heads = 8  # a value found later must not be taken for another's
    assert shorten_lengths(T.BigBirdPegasusForConditionalGeneration, config).block_size == 16


def test_a_setting_that_widths_depend_on_is_not_taken_for_a_length() -> None:
    class Blocks(T.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.extra = nn.Linear(8, config.block_width)

    _, config = llama(block_width=64)
    assert shorten_lengths(Blocks, config).block_width == 64


def test_a_classifier_that_has_no_padding_is_planned_on_several_texts() -> None:
    """transformers' classifiers take only one text at a time then."""
    config = T.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    assert config.pad_token_id is None
    model = build_with_generator(T.GPT2ForSequenceClassification, config, torch.Generator().manual_seed(0))
    assert model(input_ids=torch.tensor([[7, 8], [9, 10]])).logits.shape == (2, 2)
    assert config.pad_token_id is None
    assert build_on_meta(T.GPT2LMHeadModel, config).config.pad_token_id is None
