"""An encoder built like Nezha's: BERT whose positions are relative, in a table of a head's depth.

All heads share the table, which is added to keys and to values inside attention; so attention is eager only.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from .configuration_nezha import NezhaConfig


class RelativePositions(nn.Module):
    """Sinusoids of the clipped distance between two tokens, [tokens, tokens, depth]."""

    def __init__(self, depth: int, max_relative_position: int) -> None:
        super().__init__()
        self.depth = depth
        self.max_relative_position = max_relative_position

    def forward(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens, device=like.device)
        limit = self.max_relative_position
        distance = (places[None, :] - places[:, None]).clamp(-limit, limit) + limit
        rates = torch.exp(torch.arange(0, self.depth, 2, device=like.device) * (-math.log(1e4) / self.depth))
        angles = torch.arange(2 * limit + 1, device=like.device)[:, None] * rates
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(like.dtype)
        return table[distance]


class NezhaSelfAttention(nn.Module):
    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        self.relative_positions_encoding = RelativePositions(
            self.attention_head_size, config.max_relative_position
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        batch, heads, tokens, size = query.size()
        relations = self.relative_positions_encoding(tokens, query)
        scores = torch.matmul(query, key.transpose(-1, -2))
        by_token = query.permute(2, 0, 1, 3).contiguous().view(tokens, batch * heads, size)
        positions = torch.matmul(by_token, relations.permute(0, 2, 1)).view(tokens, batch, heads, tokens)
        scores = (scores + positions.permute(1, 2, 0, 3)) / math.sqrt(self.attention_head_size) + mask
        probabilities = functional.softmax(scores, dim=-1)
        context = torch.matmul(probabilities, value)
        by_token = probabilities.permute(2, 0, 1, 3).contiguous().view(tokens, batch * heads, tokens)
        positions = torch.matmul(by_token, relations).view(tokens, batch, heads, size)
        context = (context + positions.permute(1, 2, 0, 3)).permute(0, 2, 1, 3).contiguous()
        return context.view(*context.size()[:-2], self.all_head_size)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.permute(0, 2, 1, 3)


class NezhaSelfOutput(nn.Module):
    """A dense layer, then a norm over the sum with what came in; the same after the MLP."""

    def __init__(self, config: NezhaConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class NezhaAttention(nn.Module):
    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        self.self = NezhaSelfAttention(config)
        self.output = NezhaSelfOutput(config, config.hidden_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.output(self.self(x, mask), x)


class NezhaIntermediate(nn.Module):
    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.dense(x))


class NezhaLayer(nn.Module):
    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        self.attention = NezhaAttention(config)
        self.intermediate = NezhaIntermediate(config)
        self.output = NezhaSelfOutput(config, config.intermediate_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class NezhaEmbeddings(nn.Module):
    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids))


class NezhaPreTrainedModel(PreTrainedModel):
    config_class = NezhaConfig
    base_model_prefix = "nezha"
    _no_split_modules = ("NezhaLayer",)


class NezhaEncoder(nn.Module):
    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(NezhaLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class NezhaModel(NezhaPreTrainedModel):
    def __init__(self, config: NezhaConfig) -> None:
        super().__init__(config)
        self.embeddings = NezhaEmbeddings(config)
        self.encoder = NezhaEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        x = self.embeddings(input_ids, token_type_ids)
        mask = torch.zeros(attention_mask.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(attention_mask == 0, torch.finfo(x.dtype).min)[:, None, None, :]
        return self.encoder(x, mask)


class NezhaPredictions(nn.Module):
    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.LayerNorm(functional.gelu(self.dense(x))))


class NezhaHead(nn.Module):
    def __init__(self, config: NezhaConfig) -> None:
        super().__init__()
        self.predictions = NezhaPredictions(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.predictions(x)


class NezhaForMaskedLM(NezhaPreTrainedModel):
    _tied_weights_keys = {  # noqa: RUF012
        "cls.predictions.decoder.weight": "nezha.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: NezhaConfig) -> None:
        super().__init__(config)
        self.nezha = NezhaModel(config)
        self.cls = NezhaHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.cls.predictions.decoder = value

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> MaskedLMOutput:
        return MaskedLMOutput(logits=self.cls(self.nezha(input_ids, attention_mask, token_type_ids)))
