"""Settings of a ChatGLM3 decoder, under ChatGLM's own names."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class ChatGLMConfig(PretrainedConfig):
    model_type = "chatglm"

    def __init__(
        self,
        num_layers: int = 2,
        padded_vocab_size: int = 101,
        hidden_size: int = 64,
        ffn_hidden_size: int = 100,
        kv_channels: int = 16,
        num_attention_heads: int = 4,
        seq_length: int = 64,
        layernorm_epsilon: float = 1e-5,
        add_bias_linear: bool = False,
        add_qkv_bias: bool = True,
        multi_query_attention: bool = True,
        multi_query_group_num: int = 2,
        rope_ratio: float = 1.0,
        use_cache: bool = True,
        pad_token_id: int = 0,
        eos_token_id: int = 2,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.num_layers = num_layers
        self.vocab_size = padded_vocab_size
        self.padded_vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.kv_channels = kv_channels
        self.num_attention_heads = num_attention_heads
        self.seq_length = seq_length
        self.layernorm_epsilon = layernorm_epsilon
        self.add_bias_linear = add_bias_linear
        self.add_qkv_bias = add_qkv_bias
        self.multi_query_attention = multi_query_attention
        self.multi_query_group_num = multi_query_group_num
        self.rope_ratio = rope_ratio
        self.use_cache = use_cache
        super().__init__(
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **{"num_hidden_layers": num_layers, **kwargs},
        )
