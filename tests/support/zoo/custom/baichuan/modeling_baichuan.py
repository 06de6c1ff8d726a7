"""A decoder built like Baichuan's: one ``W_pack`` for Q, K and V as whole blocks, cut by ``unflatten``.

The 7B rotates positions; the 13B adds ALiBi, as an [heads, queries, keys] mask where nothing is padded.
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

from .configuration_baichuan import BaichuanConfig

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


def alibi_slopes(heads: int) -> list[float]:
    """One slope a head, from the full number of heads (https://arxiv.org/abs/2108.12409)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return slopes


class MLP(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    def __init__(self, config: BaichuanConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        self.W_pack = nn.Linear(self.hidden_size, 3 * self.hidden_size, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        batch, tokens, _ = x.size()
        packed = self.W_pack(x).unflatten(-1, (3, self.hidden_size)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        query, key, value = (
            part.view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2) for part in packed
        )
        if self.config.position == "rotary":
            query, key = rotate(query, positions), rotate(key, positions)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        if self.config._attn_implementation == "sdpa":
            mask = mask if mask.dim() == 4 else mask.unsqueeze(0)
            context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
            context = torch.matmul(functional.softmax(scores, dim=-1), value)
        return self.o_proj(context.transpose(1, 2).reshape(batch, tokens, self.hidden_size))


class Layer(nn.Module):
    def __init__(self, config: BaichuanConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, positions, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class BaichuanPreTrainedModel(PreTrainedModel):
    config_class = BaichuanConfig
    base_model_prefix = "model"
    _no_split_modules = ("Layer",)
    _supports_sdpa = True


class BaichuanModel(BaichuanPreTrainedModel):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any, cache: Any
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + x.shape[1], device=x.device).unsqueeze(0)
        mask = self._mask(x, past, attention_mask)
        for layer in self.layers:
            x = layer(x, mask, position_ids, cache)
        return self.norm(x)

    def _mask(self, x: torch.Tensor, past: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Added to the scores: [1 or (ALiBi) heads, queries, keys], or [batch, ...] where some are padded."""
        keys = torch.arange(past + x.shape[1], device=x.device)
        lowest = torch.finfo(x.dtype).min
        mask = torch.zeros(x.shape[1], len(keys), dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(keys[None, :] > keys[past:, None], lowest)
        if self.config.position == "alibi":
            slopes = torch.tensor(
                alibi_slopes(self.config.num_attention_heads), dtype=x.dtype, device=x.device
            )
            mask = mask + slopes[:, None, None] * keys.to(x.dtype)[None, None, :]
        else:
            mask = mask[None]
        if attention_mask is None or bool(attention_mask.all()):
            return mask
        return mask[None].masked_fill(attention_mask[:, None, None, :] == 0, lowest)


class BaichuanForCausalLM(BaichuanPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = BaichuanModel(config)
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
