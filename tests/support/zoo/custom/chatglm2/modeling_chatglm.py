"""A decoder built like ChatGLM2's: Q, K and V in one projection [Q|K|V], K and V with few groups of heads.

The layout is [tokens, batch, ...] throughout, attention a product over batch * heads.
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
    """Cosines and sines of half a head's features, [tokens, batch or 1, features, 2]."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.dim = config.kv_channels // 2

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        steps = torch.arange(0, self.dim, 2, dtype=dtype, device=positions.device)
        angles = positions.transpose(0, 1)[..., None].to(dtype) * 10000.0 ** (-steps / self.dim)
        return torch.stack([angles.cos(), angles.sin()], -1)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of the first half of the features; x is [tokens, batch, heads, head_dim]."""
    width = rope.shape[-2] * 2
    turned, rest = x[..., :width], x[..., width:]
    pairs = turned.reshape(*turned.shape[:-1], width // 2, 2)
    cos, sin = rope[:, :, None, :, 0], rope[:, :, None, :, 1]
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
        """Query, key, value [tokens, batch, heads, head_dim] -> [tokens, batch, features]."""
        if self.config._attn_implementation == "sdpa":
            query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
            context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            context = context.permute(2, 0, 1, 3)
        else:
            context = self._eager(query, key, value, mask)
        return context.reshape(*context.size()[:-2], self.hidden_size_per_partition)

    def _eager(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        batch, heads, queries, keys = query.size(1), query.size(2), query.size(0), key.size(0)
        query = query.reshape(queries, batch * heads, -1)
        key = key.reshape(keys, batch * heads, -1)
        scores = torch.baddbmm(
            query.new_zeros(batch * heads, queries, keys),
            query.transpose(0, 1),
            key.transpose(0, 1).transpose(1, 2),
            beta=0.0,
            alpha=1.0 / self.norm_factor,
        )
        probabilities = functional.softmax(scores.view(batch, heads, queries, keys) + mask, dim=-1)
        value = value.reshape(keys, batch * heads, -1)
        context = torch.bmm(probabilities.view(batch * heads, queries, keys), value.transpose(0, 1))
        return context.view(batch, heads, queries, -1).permute(2, 0, 1, 3).contiguous()


class SelfAttention(nn.Module):
    def __init__(self, config: ChatGLMConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.projection_size = config.kv_channels * config.num_attention_heads
        self.hidden_size_per_attention_head = self.projection_size // config.num_attention_heads
        self.num_attention_heads_per_partition = config.num_attention_heads
        self.multi_query_attention = config.multi_query_attention
        self.qkv_hidden_size = 3 * self.projection_size
        if self.multi_query_attention:
            self.num_multi_query_groups_per_partition = config.multi_query_group_num
            self.qkv_hidden_size = (
                self.projection_size + 2 * self.hidden_size_per_attention_head * config.multi_query_group_num
            )
        has_bias = config.add_bias_linear or config.add_qkv_bias
        self.query_key_value = nn.Linear(config.hidden_size, self.qkv_hidden_size, bias=has_bias)
        self.core_attention = CoreAttention(config)
        self.dense = nn.Linear(self.projection_size, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rope: torch.Tensor, cache: Any) -> torch.Tensor:
        """x is [tokens, batch, features]."""
        query, key, value = self._heads(self.query_key_value(x))
        query, key = rotate(query, rope), rotate(key, rope)
        if cache is not None:
            key, value = cache.update(key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), self.layer)
            key, value = key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)
        if self.multi_query_attention:
            key, value = self._repeated(key), self._repeated(value)
        return self.dense(self.core_attention(query, key, value, mask))

    def _heads(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        """[tokens, batch, features] -> query, key and value, each [tokens, batch, heads, head_dim]."""
        size = self.hidden_size_per_attention_head
        if not self.multi_query_attention:
            mixed = mixed.view(*mixed.size()[:-1], self.num_attention_heads_per_partition, 3 * size)
            return list(mixed.split(size, dim=-1))
        heads, groups = self.num_attention_heads_per_partition, self.num_multi_query_groups_per_partition
        parts = mixed.split([heads * size, groups * size, groups * size], dim=-1)
        return [
            part.view(*part.size()[:-1], count, size)
            for part, count in zip(parts, (heads, groups, groups), strict=True)
        ]

    def _repeated(self, part: torch.Tensor) -> torch.Tensor:
        """A head for every query head; part is [tokens, batch, groups, head_dim]."""
        times = self.num_attention_heads_per_partition // self.num_multi_query_groups_per_partition
        part = part.unsqueeze(-2).expand(-1, -1, -1, times, -1).contiguous()
        return part.view(*part.size()[:2], self.num_attention_heads_per_partition, part.size(-1))


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
        return self.word_embeddings(input_ids).transpose(0, 1).contiguous()


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
        logits = self.transformer.output_layer(hidden).transpose(0, 1).contiguous()
        return CausalLMOutputWithPast(logits=logits, **{_CACHE: cache})
