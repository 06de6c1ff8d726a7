"""Encoder-decoders of the zoo, at tiny widths. Data only."""

from __future__ import annotations

from typing import Any

from support.zoo.family import HEADS, HIDDEN, LAYERS, NEURONS, VOCABULARY, Family, named

__all__ = ["BART", "SEQ2SEQ", "T5", "seq2seq"]

BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": NEURONS,
    "decoder_ffn_dim": NEURONS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": 16,
    "d_ff": NEURONS,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}
LONGT5 = {**T5, "local_radius": 3, "feed_forward_proj": "gated-gelu"}
LED = {
    **{key: value for key, value in BART.items() if key != "max_position_embeddings"},
    "attention_window": 4,
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
}
FSMT = {
    **{key: value for key, value in BART.items() if key != "vocab_size"},
    "langs": ["en", "de"],
    "src_vocab_size": VOCABULARY,
    "tgt_vocab_size": VOCABULARY,
}


def seq2seq(
    name: str, stem: str, settings: dict[str, Any], head: str = "ForConditionalGeneration", **fields: Any
) -> Family:
    """A family whose classes are named ``<stem>ForConditionalGeneration`` and ``<stem>Config``."""
    return Family(name, stem + head, f"{stem}Config", settings, "seq2seq", **fields)


EAGER = {"attention": ("eager",)}
BIGBIRD = {**BART, "use_bias": True}

SEQ2SEQ = named(
    seq2seq("bigbird_pegasus", "BigBirdPegasus", {**BIGBIRD, "attention_type": "original_full"}, **EAGER),
    seq2seq("bigbird_pegasus:sparse", "BigBirdPegasus", {**BIGBIRD, "attention_type": "block_sparse",
                                                         "block_size": 2, "num_random_blocks": 1},
            tokens=24, **EAGER),
    seq2seq("fsmt", "FSMT", FSMT, **EAGER),
    seq2seq("led", "LED", LED, tokens=16, extra="global attention", **EAGER),
    seq2seq("longt5", "LongT5", {**LONGT5, "encoder_attention_type": "local"}, **EAGER),
    seq2seq("longt5:tglobal", "LongT5", {**LONGT5, "global_block_size": 2,
                                         "encoder_attention_type": "transient-global"}, **EAGER),
    seq2seq("m2m_100", "M2M100", BART),
    seq2seq("marian", "Marian", BART, "MTModel"),
    seq2seq("mvp", "Mvp", BART, **EAGER),
    seq2seq("mvp:prompts", "Mvp", {**BART, "use_prompt": True, "prompt_length": 3, "prompt_mid_dim": 20},
            **EAGER),
    seq2seq("pegasus", "Pegasus", BART),
    seq2seq("plbart", "PLBart", BART),
    seq2seq("t5", "T5", {**T5, "feed_forward_proj": "gated-gelu", "d_kv": 24}),
    seq2seq("t5:relu", "T5", T5),
)  # fmt: skip
