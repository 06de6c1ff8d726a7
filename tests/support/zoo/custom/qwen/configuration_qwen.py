"""Settings of a Qwen decoder of the first generation, under its own names."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class QWenConfig(PretrainedConfig):
    model_type = "qwen"

    def __init__(
        self,
        vocab_size: int = 101,
        hidden_size: int = 64,
        intermediate_size: int = 200,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        kv_channels: int = 16,
        seq_length: int = 64,
        layer_norm_epsilon: float = 1e-06,
        no_bias: bool = True,
        use_cache: bool = True,
        pad_token_id: int = 0,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.kv_channels = kv_channels
        self.seq_length = seq_length
        self.layer_norm_epsilon = layer_norm_epsilon
        self.no_bias = no_bias
        self.use_cache = use_cache
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
