"""A decoder built like Yuan 2's: a localised filter before q and k, whose heads are cut out of [Q|K] mixed.

``cat([q, k])`` is viewed as (heads, 2 * head_dim) and halved, so a head's rows are not contiguous: with 4
heads, head 0 takes all of its query and key from ``q_proj``'s first half. The filter, a 2-D convolution over
the full hidden size, looks two tokens back; those tokens are the third entry of a layer's cache.
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

from .configuration_yuan import YuanConfig

_CACHE = "cache" if "cache" in {entry.name for entry in fields(CausalLMOutputWithPast)} else "past_key_values"


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions; x is [batch, heads, tokens, head_dim], positions [batch, tokens]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = positions[:, None, :, None].to(x.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def causal_mask(x: torch.Tensor, past: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """[batch or 1, 1, queries, keys], added to the scores."""
    keys = torch.arange(past + x.shape[1], device=x.device)
    is_hidden = (keys[None, :] > keys[past:, None])[None, None]
    if attention_mask is not None:
        is_hidden = is_hidden | (attention_mask[:, None, None, :] == 0)
    zeros = torch.zeros(is_hidden.shape, dtype=x.dtype, device=x.device)
    return zeros.masked_fill(is_hidden, torch.finfo(x.dtype).min)


class LocalizedFiltering(nn.Module):
    """Two convolutions over (tokens, 1), each of which sees a token and the one before."""

    def __init__(self, config: YuanConfig) -> None:
        super().__init__()
        self.embed_dim = config.hidden_size
        self.conv1 = nn.Conv2d(self.embed_dim, self.embed_dim // 2, (2, 1), padding=(1, 0))
        self.conv2 = nn.Conv2d(self.embed_dim // 2, self.embed_dim, (2, 1), padding=(1, 0))
        self.output_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """x [batch, tokens, features]; before: the two tokens ahead of a single one, or None at the start."""
        tokens = x.size(1)
        if before is None:
            first = self.conv1(self._as_image(x))[:, :, :tokens]
            second = self.conv2(first)[:, :, :tokens]
        else:
            first = self.conv1(self._as_image(torch.cat([before, x], dim=1)))[:, :, 1:-1]
            second = self.conv2(first)[:, :, 1:-1]
        return self.output_layernorm(second.squeeze(-1).transpose(1, 2) + x)

    def _as_image(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, features] -> [batch, features, tokens, 1]."""
        return x.transpose(1, 2).reshape(x.size(0), self.embed_dim, x.size(1), 1)


class YuanAttention(nn.Module):
    def __init__(self, config: YuanConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        self.v_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden_size, bias=False)
        self.lf_gate = LocalizedFiltering(config)
        self.q_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=False)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        batch, tokens, _ = x.size()
        value = self.v_proj(x).view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        x = self.lf_gate(x, self._before(x, cache))
        mixed = torch.cat([self.q_proj(x), self.k_proj(x)], dim=-1)
        mixed = mixed.view(batch, tokens, self.num_heads, mixed.shape[-1] // self.num_heads)
        query, key = (part.transpose(1, 2) for part in torch.chunk(mixed, 2, dim=-1))
        query, key = rotate(query, positions), rotate(key, positions)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        if self.config._attn_implementation == "sdpa":
            context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
            context = torch.matmul(functional.softmax(scores, dim=-1), value)
        context = context.transpose(1, 2).contiguous().reshape(batch, tokens, self.hidden_size)
        return self.o_proj(context)

    def _before(self, x: torch.Tensor, cache: Any) -> torch.Tensor | None:
        """The last two tokens' inputs out of the cache, where x goes there in their turn."""
        if cache is None:
            return None
        before = cache.filtered.get(self.index)
        seen = x if before is None else torch.cat([before, x], dim=1)
        cache.filtered[self.index] = functional.pad(seen, (0, 0, 2, 0))[:, -2:]
        return before


class YuanMLP(nn.Module):
    def __init__(self, config: YuanConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * functional.silu(self.up_proj(x)))


class YuanLayer(nn.Module):
    def __init__(self, config: YuanConfig, index: int) -> None:
        super().__init__()
        self.self_attn = YuanAttention(config, index)
        self.mlp = YuanMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, positions, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class YuanPreTrainedModel(PreTrainedModel):
    config_class = YuanConfig
    base_model_prefix = "model"
    _no_split_modules = ("YuanLayer",)
    _supports_sdpa = True


class YuanModel(YuanPreTrainedModel):
    def __init__(self, config: YuanConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(YuanLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any, cache: Any
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        past = cache.get_seq_length() if cache is not None else 0
        if cache is not None and not hasattr(cache, "filtered"):
            cache.filtered = {}  # layer -> [batch, 2, features]
        if position_ids is None:
            position_ids = torch.arange(past, past + x.shape[1], device=x.device).unsqueeze(0)
        mask = causal_mask(x, past, attention_mask)
        for layer in self.layers:
            x = layer(x, mask, position_ids, cache)
        return self.norm(x)


class YuanForCausalLM(YuanPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: YuanConfig) -> None:
        super().__init__(config)
        self.model = YuanModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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
        hidden = self.model(input_ids, attention_mask, position_ids, cache)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), **{_CACHE: cache})
