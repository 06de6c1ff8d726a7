"""Attention of whole texts of which nothing is kept: they lie one behind the other in a row, and none sees
another. Knows no model and no request. Keys and values are read where the model's own projections left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from shoal.attention.base import AttentionBatch, LayerPages, Prefill, Variant
from shoal.attention.hook import AttentionContext

__all__ = ["RowContext", "texts_batch"]


def texts_batch(lengths: Sequence[int], device: torch.device | None = None) -> AttentionBatch:
    """Texts of so many tokens each, one behind the other, over pages of one position each."""
    ids = torch.arange(sum(lengths), device=device)
    bounds = list(pairwise([0, *accumulate(lengths)]))
    return AttentionBatch(ids, None, [Prefill(a, b, ids[a:b], b - a) for a, b in bounds])


class RowContext(AttentionContext):
    """As :class:`shoal.attention.hook.AttentionContext`, without pages."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        variant: Variant,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.batch is None:
            return super().attend(module, query, key, value, variant, sinks)
        return self.kernel(query, LayerPages(_pages(key), _pages(value)), self.batch, variant, sinks)


def _pages(rows: torch.Tensor) -> torch.Tensor:
    """[T, H, E] as pages of one position each, [T, 1, H, E]; a view where a head's numbers lie together."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    token, head, one = rows.stride()
    return rows.as_strided((rows.shape[0], 1, *rows.shape[1:]), (token, token, head, one))
