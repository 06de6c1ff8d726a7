"""The cache of an encoder-decoder's padded batch: the decoder's own K and V as in :mod:`.dense_cache`, and
beside them what its cross-attention keeps of the encoder's output, in pages as well.

Cross-attention K and V are written when the layers compute them, in the first pass after the encoder; from
then on they are gathered out of the pages. Knows no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from shoal.attention import pages as paging
from shoal.attention.base import KVShape, LayerPages
from shoal.attention.dense_cache import PaddedBatch, dense_cache

__all__ = ["CrossBatch", "cross_cache", "cross_pages", "kept_shapes"]


@dataclass(slots=True)
class CrossBatch:
    """Where the encoder's side of a batch lives. B rows, S columns, padded at the right end."""

    slots: torch.Tensor  # [B, S] int64: each encoder token's place, 0 where it is padding
    mask: torch.Tensor  # [B, S] int64: 1 where there is a token
    is_computed: bool  # whether its K and V are in the pages already


class _CrossLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's cross-attention K and V for one forward call."""

    def __init__(self, pages: LayerPages, batch: CrossBatch) -> None:
        # Not the parent's constructor: it sets keys and values, which are gathered here when asked for.
        self.is_initialized = True
        self._pages = pages
        self._batch = batch

    @property
    def keys(self) -> torch.Tensor:
        """[B, H, S, E]"""
        return self._pages.keys.flatten(0, 1)[self._batch.slots].transpose(1, 2)

    @property
    def values(self) -> torch.Tensor:
        """[B, H, S, E]"""
        return self._pages.values.flatten(0, 1)[self._batch.slots].transpose(1, 2)

    def lazy_initialization(self, *_: Any) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states, value_states [B, H, S, E], kept and given back."""
        is_token = self._batch.mask.bool()
        keys, values = (states.transpose(1, 2)[is_token] for states in (key_states, value_states))
        paging.write(self._pages, keys, values, self._batch.slots[is_token])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._batch.slots.shape[1], 0

    def get_seq_length(self) -> int:
        return self._batch.slots.shape[1] if self._batch.is_computed else 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def cross_cache(
    pages: Sequence[LayerPages], crossed: Sequence[LayerPages], batch: PaddedBatch, cross: CrossBatch
) -> EncoderDecoderCache:
    """A cache for one forward call.

    Args:
        pages: of the decoder's own attention, layer by layer.
        crossed: of its cross-attention, layer by layer; the same pages may serve both, in blocks apart.
    """
    return EncoderDecoderCache(
        dense_cache(list(pages), batch), Cache(layers=[_CrossLayer(layer, cross) for layer in crossed])
    )


def kept_shapes(cache: Any) -> tuple[list[KVShape], list[KVShape]]:
    """What each layer keeps of a decoder's token, and of an encoder's, as a model's own cache shows it.

    Raises:
        TypeError: it is not a cache of both.
    """
    if not isinstance(cache, EncoderDecoderCache):
        raise TypeError(f"its forward gives back a {type(cache).__name__}, no cache of encoder and decoder")
    own, cross = (
        [KVShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in half.layers]
        for half in (cache.self_attention_cache, cache.cross_attention_cache)
    )
    if len(own) != len(cross):
        raise TypeError(f"its cache has {len(own)} layers for the decoder and {len(cross)} for the encoder")
    return own, cross


def cross_pages(own: Sequence[KVShape], cross: Sequence[KVShape]) -> list[int]:
    """Which pages keep each layer's cross-attention: the layer's own where they have its shape, else further
    ones behind all layers' own.
    """
    places, following = [], len(own)
    for layer, (mine, other) in enumerate(zip(own, cross, strict=True)):
        if mine == other:
            places.append(layer)
        else:
            places.append(following)
            following += 1
    return places
