"""The padded way: a transformers ``Cache`` that keeps K and V in pages and hands out dense tensors.

For decoders with attention code of their own (their layers call ``cache.update`` and attend to what it
returns). The batch is left-padded: row b's tokens stand at the right end, so that every row's newest
token is in the last column. Knows no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from shoal.attention import pages as paging
from shoal.attention.base import KVShape, LayerPages

__all__ = ["PaddedBatch", "dense_cache", "measuring_cache", "page_in"]


@dataclass(slots=True)
class PaddedBatch:
    """Where a left-padded batch's tokens live. B rows, Q new columns each, L columns in all."""

    new: int  # Q: the tokens that every row brings
    slots: torch.Tensor  # [B * Q] int64: where their keys and values go, row by row
    past: torch.Tensor  # [B, L - Q] int64: the slot of each earlier column, 0 where it is padding
    length: int  # L


class _PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of the pages for one forward call."""

    def __init__(self, pages: LayerPages | None, batch: PaddedBatch | None, shapes: list[KVShape]) -> None:
        super().__init__()
        self._pages = pages
        self._batch = batch
        self._shapes = shapes

    def lazy_initialization(self, *_: Any) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states, value_states [B, H, Q, E] in; [B, H, L, E] out."""
        if self._batch is None or self._pages is None:
            self._shapes.append(KVShape(key_states.shape[1], key_states.shape[3], value_states.shape[3]))
            return key_states, value_states
        batch = self._batch
        keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)
        paging.write(self._pages, keys.flatten(0, 1), values.flatten(0, 1), batch.slots)
        if batch.length == keys.shape[1]:
            return key_states, value_states
        past_keys = self._pages.keys.flatten(0, 1)[batch.past].transpose(1, 2)
        past_values = self._pages.values.flatten(0, 1)[batch.past].transpose(1, 2)
        # Contiguous as the model's own cache makes them: some code views them.
        return torch.cat([past_keys, key_states], 2), torch.cat([past_values, value_states], 2)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # Some versions pass cache positions here; all that counts is how many there are.
        columns = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.get_seq_length() + columns, 0

    def get_seq_length(self) -> int:
        """Columns before the new ones."""
        return 0 if self._batch is None else self._batch.length - self._batch.new

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def dense_cache(pages: list[LayerPages], batch: PaddedBatch) -> Cache:
    """A cache for one forward call over ``batch``."""
    return Cache(layers=[_PagedLayer(layer, batch, []) for layer in pages])


def page_in(layer: Any, pages: LayerPages | None, batch: PaddedBatch) -> None:
    """Have a layer of a model's own cache keep its keys and values in ``pages`` for one forward call.

    Whatever else it keeps stays with it. A layer without any (None) says how long the others are.
    """
    paged = _PagedLayer(pages, batch, [])
    for name in ("get_mask_sizes", "get_seq_length", *(() if pages is None else ("update",))):
        if hasattr(layer, name):
            setattr(layer, name, getattr(paged, name))


def measuring_cache(num_layers: int) -> tuple[Cache, list[list[KVShape]]]:
    """A cache that keeps nothing and notes each layer's KV shape.

    Returns:
        the cache, and per layer the shapes of its updates (one entry per call).
    """
    shapes: list[list[KVShape]] = [[] for _ in range(num_layers)]
    return Cache(layers=[_PagedLayer(None, None, noted) for noted in shapes]), shapes
