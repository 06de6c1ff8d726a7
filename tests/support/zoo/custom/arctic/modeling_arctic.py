"""A decoder built like Arctic's: a mixture of experts beside a dense residual MLP, grouped-query attention.

Experts are a list of modules of their own; each is run on the tokens that its router sent it.
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

from .configuration_arctic import ArcticConfig

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


class ArcticAttention(nn.Module):
    def __init__(self, config: ArcticConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.q_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(self.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.hidden_size, self.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        batch, tokens, _ = x.size()
        query = self.q_proj(x).view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, tokens, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, tokens, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        query, key = rotate(query, positions), rotate(key, positions)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        key, value = self._repeated(key), self._repeated(value)
        if self.config._attn_implementation == "sdpa":
            context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
            context = torch.matmul(functional.softmax(scores, dim=-1), value)
        if context.size() != (batch, self.num_heads, tokens, self.head_dim):
            raise ValueError(f"attention gave {tuple(context.size())}")
        return self.o_proj(context.transpose(1, 2).contiguous().reshape(batch, tokens, self.hidden_size))

    def _repeated(self, part: torch.Tensor) -> torch.Tensor:
        """A head for every query head; part is [batch, kv_heads, tokens, head_dim]."""
        batch, heads, tokens, size = part.shape
        part = part[:, :, None].expand(batch, heads, self.num_key_value_groups, tokens, size)
        return part.reshape(batch, heads * self.num_key_value_groups, tokens, size)


class ArcticMLP(nn.Module):
    def __init__(self, config: ArcticConfig, neurons: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, neurons, bias=False)
        self.w2 = nn.Linear(neurons, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, neurons, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class ArcticMoE(nn.Module):
    """Every ``moe_layer_frequency``-th layer has experts; the others one MLP."""

    def __init__(self, config: ArcticConfig, index: int) -> None:
        super().__init__()
        self.num_experts = config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.is_moe_layer = (index + 1) % config.moe_layer_frequency == 0
        if self.is_moe_layer:
            self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
            self.experts = nn.ModuleList(
                ArcticMLP(config, config.intermediate_size) for _ in range(self.num_experts)
            )
        else:
            self.mlp = ArcticMLP(config, config.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._mixture(x) if self.is_moe_layer else self.mlp(x)

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        x = x.view(-1, width)
        weights, chosen = functional.softmax(self.gate(x), dim=1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        routes = functional.one_hot(chosen, self.num_experts).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(routes[number])
            if token.shape[0]:
                out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out.view(batch, tokens, width)


class ArcticLayer(nn.Module):
    def __init__(self, config: ArcticConfig, index: int) -> None:
        super().__init__()
        self.self_attn = ArcticAttention(config, index)
        self.block_sparse_moe = ArcticMoE(config, index)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.residual_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.residual_mlp = ArcticMLP(config, config.hidden_size)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        before = x
        x = x + self.self_attn(self.input_layernorm(x), mask, positions, cache)
        dense = x + self.residual_mlp(self.residual_layernorm(x))
        return dense + self.block_sparse_moe(self.post_attention_layernorm(before))


class ArcticPreTrainedModel(PreTrainedModel):
    config_class = ArcticConfig
    base_model_prefix = "model"
    _no_split_modules = ("ArcticLayer",)
    _supports_sdpa = True


class ArcticModel(ArcticPreTrainedModel):
    def __init__(self, config: ArcticConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ArcticLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any, cache: Any
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + x.shape[1], device=x.device).unsqueeze(0)
        mask = causal_mask(x, past, attention_mask)
        for layer in self.layers:
            x = layer(x, mask, position_ids, cache)
        return self.norm(x)


class ArcticForCausalLM(ArcticPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ArcticConfig) -> None:
        super().__init__(config)
        self.model = ArcticModel(config)
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
