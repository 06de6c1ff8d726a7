"""Settings of a Baichuan decoder: ``position`` is ``rotary`` (the 7B) or ``alibi`` (the 13B)."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class BaichuanConfig(PretrainedConfig):
    model_type = "baichuan"

    def __init__(
        self,
        vocab_size: int = 101,
        hidden_size: int = 64,
        intermediate_size: int = 100,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        max_position_embeddings: int = 64,
        rms_norm_eps: float = 1e-6,
        position: str = "rotary",
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
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.position = position
        self.use_cache = use_cache
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
