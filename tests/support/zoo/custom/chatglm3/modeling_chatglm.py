"""A decoder built like ChatGLM3's: Q, K and V in one projection [Q|K|V], K and V with few groups of heads.

The layout is [batch, heads, tokens, ...], and rotary frequencies are scaled.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_chatglm import ChatGLMConfig

_CACHE = "cache" if "cache" in {entry.name for entry in fields(CausalLMOutputWithPast)} else "past_key_values"


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of half a head's features, [batch or 1, tokens, features, 2]."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.dim = config.kv_channels // 2
        self.base = 10000.0 * config.rope_ratio

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        steps = torch.arange(0, self.dim, 2, dtype=dtype, device=positions.device)
        angles = positions[..., None].to(dtype) * self.base ** (-steps / self.dim)
        return torch.stack([angles.cos(), angles.sin()], -1)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of the first half of the features; x is [batch, heads, tokens, head_dim]."""
    width = rope.shape[-2] * 2
    turned, rest = x[..., :width], x[..., width:]
    pairs = turned.reshape(*turned.shape[:-1], width // 2, 2)
    cos, sin = rope[:, None, :, :, 0], rope[:, None, :, :, 1]
    first = pairs[..., 0] * cos - pairs[..., 1] * sin
    second = pairs[..., 1] * cos + pairs[..., 0] * sin
    return torch.cat([torch.stack([first, second], -1).flatten(3), rest], -1)


class CoreAttention(nn.Module):
    """Attention proper: no weights, but the width that its output is reshaped to."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.config = config
        projection_size = config.kv_channels * config.num_attention_heads
        self.hidden_size_per_partition = projection_size
        self.hidden_size_per_attention_head = projection_size // config.num_attention_heads
        self.num_attention_heads_per_partition = config.num_attention_heads
        self.norm_factor = math.sqrt(self.hidden_size_per_attention_head)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Query, key, value [batch, heads, tokens, head_dim] -> [batch, tokens, features]."""
        if self.config._attn_implementation == "sdpa":
            context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            size = (query.size(0), query.size(1), query.size(2), key.size(2))
            query = query.reshape(size[0] * size[1], size[2], -1)
            key = key.reshape(size[0] * size[1], size[3], -1)
            scores = torch.bmm(query, key.transpose(1, 2)).view(*size) / self.norm_factor
            probabilities = functional.softmax(scores + mask, dim=-1)
            value = value.reshape(size[0] * size[1], size[3], -1)
            context = torch.bmm(probabilities.view(size[0] * size[1], size[2], -1), value)
            context = context.view(size[0], size[1], size[2], -1)
        context = context.transpose(1, 2).contiguous()
        return context.reshape(*context.size()[:-2], self.hidden_size_per_partition)


class SelfAttention(nn.Module):
    def __init__(self, config: ChatGLMConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.projection_size = config.kv_channels * config.num_attention_heads
        self.hidden_size_per_attention_head = self.projection_size // config.num_attention_heads
        self.num_attention_heads_per_partition = config.num_attention_heads
        self.multi_query_attention = config.multi_query_attention
        self.num_multi_query_groups_per_partition = config.multi_query_group_num
        self.qkv_hidden_size = (
            self.projection_size + 2 * self.hidden_size_per_attention_head * config.multi_query_group_num
        )
        has_bias = config.add_bias_linear or config.add_qkv_bias
        self.query_key_value = nn.Linear(config.hidden_size, self.qkv_hidden_size, bias=has_bias)
        self.core_attention = CoreAttention(config)
        self.dense = nn.Linear(self.projection_size, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rope: torch.Tensor, cache: Any) -> torch.Tensor:
        """x is [batch, tokens, features]."""
        size = self.hidden_size_per_attention_head
        heads, groups = self.num_attention_heads_per_partition, self.num_multi_query_groups_per_partition
        parts = self.query_key_value(x).split([heads * size, groups * size, groups * size], dim=-1)
        query, key, value = (
            part.view(*part.size()[:-1], count, size).transpose(1, 2)
            for part, count in zip(parts, (heads, groups, groups), strict=True)
        )
        query, key = rotate(query, rope), rotate(key, rope)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        return self.dense(self.core_attention(query, self._repeated(key), self._repeated(value), mask))

    def _repeated(self, part: torch.Tensor) -> torch.Tensor:
        """A head for every query head; part is [batch, groups, tokens, head_dim]."""
        times = self.num_attention_heads_per_partition // self.num_multi_query_groups_per_partition
        part = part.unsqueeze(2).expand(-1, -1, times, -1, -1).contiguous()
        shape = (part.size(0), self.num_attention_heads_per_partition, *part.size()[3:])
        return part.view(*shape)


class MLP(nn.Module):
    """Both halves of the gated activation come out of ``dense_h_to_4h``, one after the other."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(
            config.hidden_size, 2 * config.ffn_hidden_size, bias=config.add_bias_linear
        )
        self.dense_4h_to_h = nn.Linear(
            config.ffn_hidden_size, config.hidden_size, bias=config.add_bias_linear
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.chunk(self.dense_h_to_4h(x), 2, dim=-1)
        return self.dense_4h_to_h(functional.silu(gate) * up)


class GLMBlock(nn.Module):
    def __init__(self, config: ChatGLMConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attention = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rope: torch.Tensor, cache: Any) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x), mask, rope, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class GLMTransformer(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.num_layers = config.num_layers
        self.layers = nn.ModuleList(GLMBlock(config, layer) for layer in range(config.num_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rope: torch.Tensor, cache: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask, rope, cache)
        return self.final_layernorm(x)


class ChatGLMPreTrainedModel(PreTrainedModel):
    config_class = ChatGLMConfig
    base_model_prefix = "transformer"
    _no_split_modules = ("GLMBlock",)
    _supports_sdpa = True


class Embedding(nn.Module):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(input_ids)


class ChatGLMModel(ChatGLMPreTrainedModel):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.embedding = Embedding(config)
        self.rotary_pos_emb = RotaryEmbedding(config)
        self.encoder = GLMTransformer(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding.word_embeddings = value

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any, cache: Any
    ) -> torch.Tensor:
        x = self.embedding(input_ids)
        tokens = input_ids.shape[1]
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens, device=x.device).unsqueeze(0)
        rope = self.rotary_pos_emb(position_ids, x.dtype)
        return self.encoder(x, causal_mask(x, tokens, past, attention_mask), rope, cache)


def causal_mask(x: torch.Tensor, tokens: int, past: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """[batch or 1, 1, queries, keys], added to the scores."""
    keys = torch.arange(past + tokens, device=x.device)
    is_hidden = (keys[None, :] > keys[past:, None])[None, None]
    if attention_mask is not None:
        is_hidden = is_hidden | (attention_mask[:, None, None, :] == 0)
    zeros = torch.zeros(is_hidden.shape, dtype=x.dtype, device=x.device)
    return zeros.masked_fill(is_hidden, torch.finfo(x.dtype).min)


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel, GenerationMixin):
    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.transformer.output_layer

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.transformer.output_layer = value

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        hidden = self.transformer(input_ids, attention_mask, position_ids, cache)
        logits = self.transformer.output_layer(hidden)
        return CausalLMOutputWithPast(logits=logits, **{_CACHE: cache})
