"""The listed families at published widths: two layers of each kind, heads and neurons as published.

Where a family was never published at 2048 or more, its largest model's head size and its ratio of neurons to
hidden size are kept at 2048. Widths are those of the named model's own config.json. Data only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from support.zoo.catalogue import LISTED
from support.zoo.family import Family

__all__ = ["PUBLISHED"]


def bert(vocabulary: int, **more: Any) -> dict[str, Any]:
    """BERT's ratios (64 features a head, four times as many neurons) at 2048."""
    return {"vocab_size": vocabulary, "hidden_size": 2048, "num_attention_heads": 32,
            "intermediate_size": 8192, "max_position_embeddings": 512, **more}  # fmt: skip


def bart(vocabulary: int, **more: Any) -> dict[str, Any]:
    """BART-large's ratios (64 features a head, four times as many neurons) at 2048."""
    return {"vocab_size": vocabulary, "d_model": 2048, "encoder_attention_heads": 32,
            "decoder_attention_heads": 32, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192,
            "max_position_embeddings": 1024, **more}  # fmt: skip


def llama(hidden: int, heads: int, groups: int, neurons: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {"vocab_size": vocabulary, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": groups, "intermediate_size": neurons, "max_position_embeddings": 4096,
            **more}  # fmt: skip


def gpt(hidden: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {"vocab_size": vocabulary, "n_embd": hidden, "n_head": heads, "n_positions": 2048,
            "n_inner": 4 * hidden, **more}  # fmt: skip


def t5(hidden: int, head_dim: int, heads: int, neurons: int) -> dict[str, Any]:
    return {"vocab_size": 32128, "d_model": hidden, "d_kv": head_dim, "num_heads": heads, "d_ff": neurons,
            "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}  # fmt: skip


_XLM = {"vocab_size": 30145, "emb_dim": 2048, "n_heads": 16, "max_position_embeddings": 512}
_LED = {key: value for key, value in bart(50265).items() if key != "max_position_embeddings"}
_FSMT = {key: value for key, value in bart(0).items() if key != "vocab_size"}
_DEBERTA = bert(128100, max_relative_positions=256)

_WIDTHS: dict[str, dict[str, Any]] = {
    "albert": bert(30000, num_attention_heads=16, embedding_size=128),  # albert-xlarge-v2
    "arctic": llama(7168, 56, 8, 4864, 32000, num_local_experts=128),  # snowflake-arctic-base
    "baichuan": {"vocab_size": 64000, "hidden_size": 4096, "num_attention_heads": 32,
                 "intermediate_size": 11008, "max_position_embeddings": 4096},  # Baichuan-7B
    "baichuan:13b alibi": {"vocab_size": 64000, "hidden_size": 5120, "num_attention_heads": 40,
                           "intermediate_size": 13696, "max_position_embeddings": 4096},  # Baichuan-13B
    "bert": bert(30522),
    "bigbird_pegasus": bart(96103),
    "bigbird_pegasus:sparse": bart(96103),
    "bloom": {"vocab_size": 250880, "hidden_size": 4096, "n_head": 32},  # bloom-7b1
    "camembert": bert(32005),
    "chatglm2": {"padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696,
                 "kv_channels": 128, "num_attention_heads": 32, "seq_length": 4096},  # chatglm2-6b
    "chatglm3": {"padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696,
                 "kv_channels": 128, "num_attention_heads": 32, "seq_length": 4096},  # chatglm3-6b
    "codegen": gpt(4096, 16, 51200, rotary_dim=64),  # codegen-6B
    "codellama": llama(8192, 64, 8, 22016, 32000),  # CodeLlama-34b
    "deberta": {**_DEBERTA, "vocab_size": 50265},
    "deberta_v2": {**_DEBERTA, "position_buckets": 256},
    "deberta_v2:own_poskey": _DEBERTA,
    "electra": bert(30522, embedding_size=1024),
    "ernie": bert(40000),
    "esm": bert(33, hidden_size=2560, num_attention_heads=40, intermediate_size=10240),  # esm2_t36_3B
    "falcon": {"vocab_size": 65024, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
               "ffn_hidden_size": 32768},  # falcon-40b
    "falcon:7b multi-query": {"vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71,
                              "ffn_hidden_size": 18176},  # falcon-7b
    "falcon:rw alibi": {"vocab_size": 50304, "hidden_size": 4096, "num_attention_heads": 64,
                        "ffn_hidden_size": 16384},  # falcon-rw-7b
    "flaubert": _XLM,
    "fsmt": {**_FSMT, "src_vocab_size": 42024, "tgt_vocab_size": 42024},
    "glm": llama(4096, 32, 2, 13696, 151552, head_dim=128),  # glm-4-9b
    "gpt-j": gpt(4096, 16, 50400, rotary_dim=64),  # gpt-j-6b
    "gpt-neo": {"vocab_size": 50257, "hidden_size": 2560, "num_heads": 20, "intermediate_size": 10240,
                "max_position_embeddings": 2048, "window_size": 256},  # gpt-neo-2.7B
    "gpt-neox": {"vocab_size": 50432, "hidden_size": 6144, "num_attention_heads": 64,
                 "intermediate_size": 24576, "rotary_pct": 0.25,
                 "max_position_embeddings": 2048},  # gpt-neox-20b
    "gpt2": gpt(2560, 32, 50257),  # Cerebras-GPT-2.7B
    "gpt_oss": llama(2880, 64, 8, 2880, 201088, head_dim=64, num_local_experts=32,
                     num_experts_per_tok=4),  # gpt-oss-20b
    "led": {**_LED, "max_encoder_position_embeddings": 16384, "max_decoder_position_embeddings": 1024},
    "llama": llama(4096, 32, 32, 11008, 32000),  # llama-7b
    "llama2": llama(8192, 64, 8, 28672, 32000),  # Llama-2-70b
    "longformer": bert(50265, max_position_embeddings=4098),
    "longt5": t5(2048, 64, 32, 5120),  # long-t5-local-xl
    "longt5:tglobal": t5(2048, 64, 32, 5120),  # long-t5-tglobal-xl
    "luke": bert(50267, entity_vocab_size=500000, entity_emb_size=256),
    "m2m_100": bart(256206, encoder_attention_heads=16, decoder_attention_heads=16),  # nllb-200-3.3B
    "marian": bart(58101),
    "mistral": llama(4096, 32, 8, 14336, 32000, sliding_window=4096),  # Mistral-7B-v0.1
    "mixtral": llama(4096, 32, 8, 14336, 32000, num_local_experts=8),  # Mixtral-8x7B-v0.1
    "mpt": {"vocab_size": 50432, "d_model": 4096, "n_heads": 32, "max_seq_len": 2048},  # mpt-7b
    "mvp": bart(50267),
    "nezha": bert(21128, max_relative_position=64),
    "openai": gpt(2048, 32, 40478),
    "opt": {"vocab_size": 50272, "hidden_size": 4096, "num_attention_heads": 32, "ffn_dim": 16384,
            "max_position_embeddings": 2048, "word_embed_proj_dim": 4096},  # opt-6.7b
    "pegasus": bart(96103),
    "perceiver": {"vocab_size": 262, "num_latents": 256, "d_latents": 2048, "d_model": 768,
                  "qk_channels": 2048, "v_channels": 2048, "num_self_attention_heads": 16,
                  "num_cross_attention_heads": 16, "max_position_embeddings": 64},
    "phi": llama(2560, 32, 32, 10240, 51200, partial_rotary_factor=0.4),  # phi-2
    "phi3": llama(3072, 32, 32, 8192, 32064),  # Phi-3-mini-4k-instruct
    "plbart": bart(50005),
    "qwen": {"vocab_size": 151936, "hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128,
             "intermediate_size": 22016, "seq_length": 8192},  # Qwen-7B
    "qwen2": llama(3584, 28, 4, 18944, 152064),  # Qwen2-7B
    "qwen2-moe": llama(2048, 16, 16, 5632, 151936, num_experts=60, num_experts_per_tok=4,
                       moe_intermediate_size=1408, shared_expert_intermediate_size=5632),  # Qwen1.5-MoE
    "qwen2.5": llama(2048, 16, 2, 11008, 151936),  # Qwen2.5-3B
    "qwen3": llama(4096, 32, 8, 12288, 151936, head_dim=128),  # Qwen3-8B
    "reformer": {"vocab_size": 320, "hidden_size": 2048, "num_attention_heads": 16,
                 "attention_head_size": 128, "feed_forward_size": 8192, "axial_pos_embds_dim": [512, 1536]},
    "roberta": bert(50265),
    "roformer": bert(50000, embedding_size=768),
    "splinter": bert(28996),
    "starcode": gpt(6144, 48, 49152),  # starcoder
    "starcoder2": llama(4608, 36, 4, 18432, 49152),  # starcoder2-7b
    "t5": t5(4096, 64, 64, 10240),  # t5-v1_1-xxl
    "xglm": {"vocab_size": 256008, "d_model": 4096, "attention_heads": 32, "ffn_dim": 16384,
             "max_position_embeddings": 2048},  # xglm-7.5B
    "xlm": _XLM,  # xlm-mlm-en-2048
    "xlm_roberta": bert(250002),
    "xlnet": {"vocab_size": 32000, "d_model": 2048, "n_head": 32, "d_inner": 8192},
    "yoso": bert(50265),
    "yuan": {"vocab_size": 135040, "hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 8192,
             "max_position_embeddings": 8192},  # Yuan2-2B
}  # fmt: skip


def _widened(name: str, widths: dict[str, Any]) -> Family:
    tiny = LISTED[name]
    return dataclasses.replace(tiny, settings={**tiny.settings, **widths})


PUBLISHED: dict[str, Family] = {name: _widened(name, widths) for name, widths in _WIDTHS.items()}
