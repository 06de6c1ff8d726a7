"""Model classes and configs for the planner's tests, at small widths that share no factor by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as T

Family = Callable[[], tuple[type[Any], Any]]

_LLAMA: dict[str, Any] = {
    "vocab_size": 101,  # prime: no rank count divides it
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**changes: Any) -> tuple[type[Any], Any]:
    """A llama of 6 query and 3 KV heads, unless changed."""
    return T.LlamaForCausalLM, T.LlamaConfig(**{**_LLAMA, **changes})


def demo() -> tuple[type[Any], Any]:
    """The demo model's own shape: 9 query heads, 3 KV heads, tied, 30 layers."""
    return llama(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, tie_word_embeddings=True,
    )  # fmt: skip


def bloom() -> tuple[type[Any], Any]:
    return T.BloomForCausalLM, T.BloomConfig(vocab_size=101, hidden_size=128, n_layer=2, n_head=4)


def gpt_neox() -> tuple[type[Any], Any]:
    changes = {"num_key_value_heads": None, "num_attention_heads": 6}
    shape = {key: value for key, value in {**_LLAMA, **changes}.items() if value is not None}
    return T.GPTNeoXForCausalLM, T.GPTNeoXConfig(**shape)


def gpt2() -> tuple[type[Any], Any]:
    return T.GPT2LMHeadModel, T.GPT2Config(
        vocab_size=101, n_embd=96, n_layer=2, n_head=6, n_positions=64, bos_token_id=1, eos_token_id=2
    )


def opt() -> tuple[type[Any], Any]:
    return T.OPTForCausalLM, T.OPTConfig(
        vocab_size=101, hidden_size=96, num_hidden_layers=2, num_attention_heads=6, ffn_dim=160,
        max_position_embeddings=64, word_embed_proj_dim=96, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def qwen2() -> tuple[type[Any], Any]:
    return T.Qwen2ForCausalLM, T.Qwen2Config(**_LLAMA)


def qwen3() -> tuple[type[Any], Any]:
    return T.Qwen3ForCausalLM, T.Qwen3Config(**_LLAMA, head_dim=24)


def mistral() -> tuple[type[Any], Any]:
    return T.MistralForCausalLM, T.MistralConfig(**_LLAMA, sliding_window=5)


FAMILIES: dict[str, Family] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "bloom": bloom,
}
