"""What a policy means for a model's weights: names found, words fitted to what they are said of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from shoal.errors import UsageError
from shoal.plan.policy import read_policy
from shoal.plan.skeleton import build_on_meta
from shoal.plan.wishes import wishes_of
from support.planner import bloom, llama

LAYERS = "model.layers.*."


def asked(policy: Any, family: tuple[type[Any], Any] | None = None) -> dict[str, str]:
    read = read_policy(policy)
    assert read is not None
    return {name: wish.op for name, wish in wishes_of(read, build_on_meta(*(family or llama()))).items()}


def mixtral() -> tuple[type[Any], Any]:
    return T.MixtralForCausalLM, T.MixtralConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.*.mlp.up_proj", "model.layers.*.mlp.up_proj.weight", "layers.*.mlp.up_proj",
        "*.up_proj", "*.mlp.up_*",
    ],
)  # fmt: skip
def test_a_pattern_may_name_module_or_weight_with_or_without_the_base_models_prefix(key: str) -> None:
    assert asked({key: "column"}) == {f"{LAYERS}mlp.up_proj.weight": "column"}


def test_a_star_inside_a_pattern_stands_for_one_component() -> None:
    bert = (
        T.BertForMaskedLM,
        T.BertConfig(
            vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
        ),
    )
    assert asked({"bert.encoder.layer.*.output.dense": "row"}, bert) == {
        "bert.encoder.layer.*.output.dense.weight": "row"
    }


def test_deepspeeds_names_are_those_in_the_block_or_ends_of_such() -> None:
    t5 = (
        T.T5ForConditionalGeneration,
        T.T5Config(vocab_size=101, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16),
    )
    found = asked({"T5Block": ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}, t5)
    assert set(found.values()) == {"row"}
    assert len(found) == 5  # encoder: self-attention and MLP; decoder: these and cross-attention
    assert asked({"BloomBlock": "mlp.dense_4h_to_h"}, bloom()) == {
        "transformer.h.*.mlp.dense_4h_to_h.weight": "row"
    }


def test_transformers_own_plan_is_taken_whole() -> None:
    further = {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    found = asked({**T.LlamaConfig.base_model_tp_plan, **further})
    assert found == {
        **{f"{LAYERS}self_attn.{name}_proj.weight": "column" for name in "qkv"},
        f"{LAYERS}self_attn.o_proj.weight": "row",
        f"{LAYERS}mlp.gate_proj.weight": "column",
        f"{LAYERS}mlp.up_proj.weight": "column",
        f"{LAYERS}mlp.down_proj.weight": "row",
        "model.embed_tokens.weight": "vocab",
        "lm_head.weight": "gather",
    }


def test_an_entry_of_transformers_own_plan_may_name_what_this_config_has_not() -> None:
    """DeepSeek's plan has dense layers and experts; a config may have only the one."""
    config = T.DeepseekV3Config(
        vocab_size=101, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    found = asked(config.base_model_tp_plan, (T.DeepseekV3ForCausalLM, config))
    assert found[f"{LAYERS}mlp.shared_experts.down_proj.weight"] == "row"
    assert f"{LAYERS}mlp.down_proj.weight" not in found


def test_experts_are_all_the_stacks_of_their_module() -> None:
    both = {f"{LAYERS}mlp.experts.{name}": "experts" for name in ("gate_up_proj", "down_proj")}
    assert asked({f"{LAYERS}mlp.experts": "experts"}, mixtral()) == both
    assert asked({f"{LAYERS}mlp.experts.down_proj": "grouped_gemm"}, mixtral()) == both


def test_a_module_may_be_gathered_or_kept_with_all_that_is_in_it() -> None:
    assert asked({f"{LAYERS}mlp": "replicate"}) == {
        f"{LAYERS}mlp.{name}_proj.weight": "replicate" for name in ("gate", "up", "down")
    }
    found = asked({"model": "gather"})
    assert found["model.embed_tokens.weight"] == "vocab"
    assert found[f"{LAYERS}self_attn.k_proj.weight"] == "gather"


def test_tied_weights_share_a_wish() -> None:
    tied = llama(tie_word_embeddings=True)
    assert asked({"lm_head": "gather"}, tied) == {
        "lm_head.weight": "gather",
        "model.embed_tokens.weight": "vocab",
    }
    assert set(asked({"model.embed_tokens": "replicate"}, tied).values()) == {"replicate"}


def test_words_fit_what_they_are_said_of() -> None:
    assert asked({"model.embed_tokens": "rowwise"}) == {"model.embed_tokens.weight": "vocab"}
    assert asked({"lm_head": "vocab"}) == {"lm_head.weight": "gather"}


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({"LlamaDecoderLayr": ("self_attn.o_proj",)}, "nearest are: LlamaDecoderLayer"),
        (
            {"LlamaDecoderLayer": ("self_attn.out_proj",)},
            "'self_attn.out_proj' names no linear .* self_attn.o_proj",
        ),
        ({"lm_hed": "gather"}, "lm_hed: nothing in the model .* nearest are: lm_head"),
        ({"*.self_attn.q_prj": "column"}, r"nearest are: \*\.self_attn\.q_proj, "),
        ({"(any)": "column"}, "there are: model, "),
        ({"lm_head": "gathr"}, "lm_head: unknown style 'gathr'; nearest are: gather"),
        ({f"{LAYERS}mlp": "column"}, "a LlamaMLP is no linear; name what is in it: .*up_proj"),
        ({f"{LAYERS}mlp": "experts"}, "only experts that are stacked"),
        ({"lm_head": "experts"}, "a linear is no stack"),
        ({"model.embed_tokens": "gather"}, "say vocab"),
        (
            {"model.layers.0.self_attn.k_proj": "gather"},
            "all layers alike: ask for model.layers.*.self_attn.k_proj",
        ),
        (
            {"*.k_proj": "gather", f"{LAYERS}self_attn.k_proj": "row"},
            "k_proj.weight as row, but .* asks for gather",
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused_with_the_nearest_names(policy: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        asked(policy)


def test_tied_weights_cannot_be_split_and_whole() -> None:
    with pytest.raises(UsageError, match="one tied parameter"):
        asked({"lm_head": "replicate", "model.embed_tokens": "vocab"}, llama(tie_word_embeddings=True))


def test_a_bias_is_not_asked_for_by_itself() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 4)

    policy = read_policy({"out.bias": "replicate"})
    assert policy is not None
    with torch.device("meta"), pytest.raises(UsageError, match="name the weight"):
        wishes_of(policy, Tiny())
