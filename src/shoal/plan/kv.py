"""How many KV heads a rank's cache holds, read off the caches that rank-local code filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.plan.drive import Pass
from shoal.plan.skeleton import Cut
from shoal.plan.types import KeyValueHeads, Range

__all__ = ["key_value_heads"]


def key_value_heads(whole: Pass, ranks: Sequence[Pass], cut: Cut) -> tuple[KeyValueHeads, ...]:
    """Group the full model's layers by what a token takes in their cache.

    Args:
        whole: prefill of the unsplit, shortened model.
        ranks: the same pass as each rank's code ran it.
        cut: which full layers the short model's layers stand for.

    Returns:
        one entry per run of equal layers; empty where the cache is not keys and values of
        ``[batch, heads, tokens, features]`` per layer.
    """
    shapes = [_shapes(run.cache) for run in (whole, *ranks)]
    counts = {len(entry) for entry in shapes}
    if len(counts) > 1 or counts == {0}:
        return ()
    kinds = _kinds(cut, counts.pop())
    if kinds is None:
        return ()
    found: list[KeyValueHeads] = []
    for layer, kind in enumerate(kinds):
        full, *parts = (entry[kind] for entry in shapes)
        heads = tuple(part[0] for part in parts)
        entry = KeyValueHeads(((layer, layer + 1),), heads, full[1], full[2], any(n < full[0] for n in heads))
        found = _append(found, entry)
    return tuple(found)


def _append(found: list[KeyValueHeads], entry: KeyValueHeads) -> list[KeyValueHeads]:
    """Add a layer to the entry that is equal but for its layers, or as a new one."""
    key = (entry.heads, entry.key_dim, entry.value_dim, entry.is_split)
    for position, other in enumerate(found):
        if (other.heads, other.key_dim, other.value_dim, other.is_split) == key:
            layers = _joined((*other.layers, *entry.layers))
            found[position] = KeyValueHeads(layers, *key)
            return found
    return [*found, entry]


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _kinds(cut: Cut, num_layers: int) -> tuple[int, ...] | None:
    """The stack whose short form has that many layers; a decoder's comes last."""
    for name in reversed(cut.kinds):
        if cut.depths[name] == num_layers:
            return cut.kinds[name]
    return None


def _shapes(cache: Any) -> list[tuple[int, int, int]]:
    """(heads, key features, value features) per layer of a transformers cache."""
    own = getattr(cache, "self_attention_cache", cache)
    found: list[tuple[int, int, int]] = []
    for layer in getattr(own, "layers", ()):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
            return []
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[1] != values.shape[1]:
            return []
        found.append((keys.shape[1], keys.shape[3], values.shape[3]))
    return found
