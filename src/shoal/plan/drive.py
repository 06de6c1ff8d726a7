"""Runs a model once: what it is called with, and what of its output counts. Knows no plan.

Arguments are chosen by the signature of the model's ``forward``, so that one function serves decoders,
encoders and encoder-decoders of every transformers version.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError

__all__ = ["Batch", "Pass", "batch_of", "decode_pass", "floating_outputs", "prefill_pass"]

CACHE_NAMES = ("cache", "past_key_values")  # the second is the older name


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids ``[batch, tokens]`` and which of them are real (mask of the same shape, 1 or 0)."""

    ids: torch.Tensor
    mask: torch.Tensor
    next_ids: torch.Tensor  # [batch, 1], fed in the decode step
    target_ids: torch.Tensor  # [batch, fewer tokens], a decoder's own prompt in encoder-decoders


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward: its floating-point outputs, and the cache it left (None if the model keeps none)."""

    outputs: tuple[torch.Tensor, ...]
    cache: Any
    encoder_state: torch.Tensor | None


def batch_of(vocabulary: int, batch: int, tokens: int, padding: int = 0, seed: int = 1) -> Batch:
    """Random ids; the first row's last ``padding`` tokens are masked out.

    The last, not the first: a causal row that may look at nothing at all is NaN in float64, where eager
    attention's "minus infinity" does not survive the softmax's cast to float32.
    """
    generator = torch.Generator().manual_seed(seed)
    low = min(5, vocabulary - 1)  # small ids tend to mean padding, begin and end

    def draw(count: int) -> torch.Tensor:
        return torch.randint(low, min(vocabulary, 1000), (batch, count), generator=generator)

    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[0, tokens - padding :] = 0
    return Batch(draw(tokens), mask, draw(1), draw(max(2, tokens - 2)))


def prefill_pass(model: nn.Module, batch: Batch) -> Pass:
    """The whole batch at once, asking for a cache where the model has one."""
    arguments: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.mask}
    if _config(model, "is_encoder_decoder"):
        arguments["decoder_input_ids"] = batch.target_ids
    return _call(model, arguments)


def decode_pass(model: nn.Module, batch: Batch, before: Pass) -> Pass:
    """One further token per row, on the cache that ``before`` left (which it changes)."""
    mask = torch.cat([batch.mask, torch.ones_like(batch.next_ids)], 1)
    cache_name = _cache_name(model)
    assert cache_name is not None, "only a model that left a cache can go on from it"
    arguments: dict[str, Any] = {cache_name: before.cache, "attention_mask": mask}
    if _config(model, "is_encoder_decoder"):
        arguments |= {"decoder_input_ids": batch.next_ids, "attention_mask": batch.mask}
        arguments["encoder_outputs"] = (before.encoder_state,)
    else:
        arguments["input_ids"] = batch.next_ids
    return _call(model, arguments)


def floating_outputs(output: Any) -> tuple[torch.Tensor, ...]:
    """Every floating-point tensor of a model's output; caches and hidden bookkeeping left out."""
    if isinstance(output, torch.Tensor):
        return (output,) if output.is_floating_point() else ()
    if isinstance(output, Mapping):
        parts: Sequence[Any] = [value for key, value in output.items() if key not in CACHE_NAMES]
    elif isinstance(output, (tuple, list)):
        parts = output
    else:
        return ()
    return tuple(tensor for part in parts for tensor in floating_outputs(part))


def _call(model: nn.Module, arguments: dict[str, Any]) -> Pass:
    accepted = set(inspect.signature(model.forward).parameters)
    if "use_cache" in accepted and _cache_name(model) is not None:
        arguments["use_cache"] = True
    arguments = {name: value for name, value in arguments.items() if name in accepted and value is not None}
    output = model(**arguments)
    named = dict(output.items()) if isinstance(output, Mapping) else {}
    cache = next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)
    outputs = floating_outputs(output)
    if not outputs:
        raise PlanError(f"{type(model).__name__} gives no floating-point output")
    return Pass(outputs, cache, named.get("encoder_last_hidden_state"))


def _cache_name(model: nn.Module) -> str | None:
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), None)


def _config(model: nn.Module, name: str) -> Any:
    return getattr(getattr(model, "config", None), name, None)
