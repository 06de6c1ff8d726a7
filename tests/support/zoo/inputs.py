"""What a family's model is fed, by its kind and its special inputs. Knows no sharding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch

from support.zoo.family import Family

__all__ = ["Padding", "floating_outputs", "forward_inputs", "generate_inputs"]

Padding = Literal["none", "left", "right"]
_CACHES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
_PADDED = 3  # tokens of the first of two rows
_TARGETS = 7


def forward_inputs(family: Family, model: Any, padding: Padding) -> dict[str, Any]:
    """Two rows of ids, the first padded; special inputs where the family names some."""
    accepted = inspect.signature(model.forward).parameters
    ids, mask = _ids(family.tokens, 1), torch.ones(2, family.tokens, dtype=torch.long)
    if padding == "left":
        mask[0, :_PADDED] = 0
    elif padding == "right":
        mask[0, -_PADDED:] = 0
    inputs: dict[str, Any] = {"input_ids" if "input_ids" in accepted else "inputs": ids}
    if "attention_mask" in accepted:
        inputs["attention_mask"] = mask
    if family.kind == "seq2seq":
        inputs["decoder_input_ids"] = _ids(_TARGETS, 2)
    if family.extra == "global attention":
        where = torch.zeros_like(mask)
        where[:, 3] = 1  # a token that padding on either side leaves
        inputs["global_attention_mask"] = where
    if family.extra == "entities":
        inputs |= _entities()
    return inputs


def generate_inputs(family: Family, model: Any) -> dict[str, Any]:
    """A prompt of two rows: padded left for what goes on from its last token, right for an encoder.

    A model without a mask gets none (its rows are all real).
    """
    inputs = forward_inputs(family, model, "right" if family.kind == "seq2seq" else "left")
    inputs.pop("decoder_input_ids", None)
    return inputs


def floating_outputs(output: Any) -> list[torch.Tensor]:
    """Every floating-point tensor that a model returns, caches left out."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = [value for key, value in output.items() if key not in _CACHES]
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in floating_outputs(part)]
    return []


def _ids(tokens: int, seed: int) -> torch.Tensor:
    """Two rows of ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 101, (2, tokens), generator=generator)


def _entities() -> dict[str, torch.Tensor]:
    """Three entities a row, two tokens each."""
    positions = torch.full((2, 3, 4), -1)
    positions[:, :, 0] = torch.tensor([3, 5, 7])
    positions[:, :, 1] = torch.tensor([4, 6, 8])
    return {
        "entity_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]),
        "entity_attention_mask": torch.ones(2, 3, dtype=torch.long),
        "entity_position_ids": positions,
    }
