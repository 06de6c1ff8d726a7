"""Tiny models and files for the checkpoint tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from gguf import GGMLQuantizationType, GGUFWriter, quantize

VOCABULARY = 320


def tiny_llama(tied: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = T.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return T.LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: Any, leave_out: str = "", quantised: str = "") -> Path:
    """A llama as llama.cpp's converter writes it: rotary halves of query and key rows interleaved."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    _write_tokenizer(writer)
    for name, weight in model.state_dict().items():
        stored = _gguf_name(name)
        if stored == leave_out or (stored == "output.weight" and config.tie_word_embeddings):
            continue
        values = _permuted(name, weight, config).numpy()
        if stored == quantised:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: GGUFWriter) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *bytes_to_unicode().values(), "ab", "cd"]
    tokens += [f"unused{number}" for number in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")


def _gguf_name(name: str) -> str:
    for theirs, ours in {
        "model.layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd",
        "model.norm": "output_norm", "lm_head": "output",
    }.items():  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def _permuted(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((count for part, count in heads.items() if part in name), None)
    if count is None:
        return weight
    rows = weight.view(count, 2, weight.shape[0] // count // 2, weight.shape[1])
    return rows.transpose(1, 2).reshape(weight.shape)


@pytest.fixture
def make_llama() -> Callable[..., Any]:
    return tiny_llama


@pytest.fixture
def make_gguf() -> Callable[..., Path]:
    return write_gguf


@pytest.fixture
def shoal_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
