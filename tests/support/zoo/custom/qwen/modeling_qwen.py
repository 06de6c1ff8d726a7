"""A decoder built like the first Qwen's: ``c_attn`` gives whole blocks [Q|K|V], cut by ``split_size``.

``w1`` and ``w2`` of the gated MLP have half of ``intermediate_size`` neurons each.
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

from .configuration_qwen import QWenConfig

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


class QWenAttention(nn.Module):
    def __init__(self, config: QWenConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.hidden_size = config.hidden_size
        self.split_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        self.projection_size = config.kv_channels * config.num_attention_heads
        self.c_attn = nn.Linear(config.hidden_size, 3 * self.projection_size)
        self.c_proj = nn.Linear(config.hidden_size, self.projection_size, bias=not config.no_bias)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        query, key, value = self.c_attn(x).split(self.split_size, dim=2)
        query = rotate(self._split_heads(query, self.num_heads, self.head_dim), positions)
        key = rotate(self._split_heads(key, self.num_heads, self.head_dim), positions)
        value = self._split_heads(value, self.num_heads, self.head_dim)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        if self.config._attn_implementation == "sdpa":
            context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(value.size(-1)) + mask
            context = torch.matmul(functional.softmax(scores, dim=-1), value)
        return self.c_proj(self._merge_heads(context, self.num_heads, self.head_dim))

    def _split_heads(self, tensor: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
        return tensor.view(*tensor.size()[:-1], num_heads, head_dim).transpose(1, 2)

    def _merge_heads(self, tensor: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
        tensor = tensor.transpose(1, 2).contiguous()
        return tensor.view(*tensor.size()[:-2], num_heads * head_dim)


class QWenMLP(nn.Module):
    def __init__(self, config: QWenConfig) -> None:
        super().__init__()
        neurons = config.intermediate_size // 2
        self.w1 = nn.Linear(config.hidden_size, neurons, bias=not config.no_bias)
        self.w2 = nn.Linear(config.hidden_size, neurons, bias=not config.no_bias)
        self.c_proj = nn.Linear(neurons, config.hidden_size, bias=not config.no_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.w1(x) * functional.silu(self.w2(x)))


class QWenBlock(nn.Module):
    def __init__(self, config: QWenConfig, index: int) -> None:
        super().__init__()
        self.ln_1 = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = QWenAttention(config, index)
        self.ln_2 = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = QWenMLP(config)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), mask, positions, cache)
        return x + self.mlp(self.ln_2(x))


class QWenPreTrainedModel(PreTrainedModel):
    config_class = QWenConfig
    base_model_prefix = "transformer"
    _no_split_modules = ("QWenBlock",)
    _supports_sdpa = True


class QWenModel(QWenPreTrainedModel):
    def __init__(self, config: QWenConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(QWenBlock(config, index) for index in range(config.num_hidden_layers))
        self.ln_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.wte = value

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any, cache: Any
    ) -> torch.Tensor:
        x = self.wte(input_ids)
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + x.shape[1], device=x.device).unsqueeze(0)
        mask = causal_mask(x, past, attention_mask)
        for layer in self.h:
            x = layer(x, mask, position_ids, cache)
        return self.ln_f(x)


class QWenLMHeadModel(QWenPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: QWenConfig) -> None:
        super().__init__(config)
        self.transformer = QWenModel(config)
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
        hidden = self.transformer(input_ids, attention_mask, position_ids, cache)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), **{_CACHE: cache})
