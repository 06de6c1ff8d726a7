"""The reference kernels: paged attention by torch's scaled_dot_product_attention, or by plain matrix
products (``eager``). Right on every device; others are measured against these. Knows no model.

Sequences with one token go as one padded batch; each longer one goes alone, so that no mask ever spans
the whole batch: the cost is the sum of q*k over sequences, not the product of the sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from shoal.attention.base import AttentionBatch, DecodeGroup, LayerPages, Prefill, Variant
from shoal.attention.pages import gather

__all__ = ["paged_eager", "paged_sdpa", "unpaged"]

# query [B, Hq, Q, Ek], key [B, H, L, Ek], value [B, H, L, Ev], mask or None (Q == L and no window), variant,
# sinks broadcastable to [B, Hq, Q, 1] or None; returns [B, Hq, Q, Ev]
_Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Variant, torch.Tensor | None],
    torch.Tensor,
]


def paged_sdpa(
    query: torch.Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    variant: Variant,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See :class:`shoal.attention.base.PagedKernel`. Soft-capped scores and sinks go the eager way."""
    if variant.softcap is not None or sinks is not None:
        return paged_eager(query, pages, batch, variant, sinks)
    return _paged(query, pages, batch, variant, sinks, _sdpa)


def paged_eager(
    query: torch.Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    variant: Variant,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See :class:`shoal.attention.base.PagedKernel`. Softmax in float32, float64 for float64."""
    return _paged(query, pages, batch, variant, sinks, _eager)


def unpaged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: Variant, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One sequence without pages.

    Args:
        query: [T, Hq, Ek].
        key: [T, H, Ek].
        value: [T, H, Ev].

    Returns:
        [T, Hq, Ev].
    """
    tokens = query.shape[0]
    mask = _mask(tokens, tokens, variant, query.device)
    attend = _sdpa if variant.softcap is None and sinks is None else _eager
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = attend(q, k, v, mask, variant, None if sinks is None else sinks.view(1, -1, 1, 1))
    return out[0].transpose(0, 1)


def _paged(
    query: torch.Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    variant: Variant,
    sinks: torch.Tensor | None,
    attend: _Attend,
) -> torch.Tensor:
    out = query.new_empty(query.shape[0], query.shape[1], pages.values.shape[-1])
    if batch.decode is not None:
        out[: batch.decode.size] = _decode(
            query[: batch.decode.size], pages, batch.decode, variant, sinks, attend
        )
    for prefill in batch.prefills:
        rows = slice(prefill.start, prefill.stop)
        out[rows] = _prefill(query[rows], pages, prefill, variant, sinks, attend)
    return out


def _decode(
    query: torch.Tensor,
    pages: LayerPages,
    group: DecodeGroup,
    variant: Variant,
    sinks: torch.Tensor | None,
    attend: _Attend,
) -> torch.Tensor:
    keys, values = gather(pages.keys, group.block_table), gather(pages.values, group.block_table)
    mask = group.masks.get(variant.window)
    if mask is None:
        positions = torch.arange(keys.shape[-2], device=query.device)
        visible = positions < group.lengths[:, None]
        if variant.window is not None:
            visible &= positions >= group.lengths[:, None] - variant.window
        mask = group.masks[variant.window] = visible[:, None, None, :]
    # The query heads of one KV head stand in as its "tokens": grouped attention without copying K and V.
    size, heads = query.shape[0], keys.shape[1]
    grouped = query.view(size, heads, -1, query.shape[-1])
    sink_rows = None if sinks is None else sinks.view(1, heads, -1, 1)
    return attend(grouped, keys, values, mask, variant, sink_rows).reshape(size, query.shape[1], -1)


def _prefill(
    query: torch.Tensor,
    pages: LayerPages,
    prefill: Prefill,
    variant: Variant,
    sinks: torch.Tensor | None,
    attend: _Attend,
) -> torch.Tensor:
    keys = gather(pages.keys, prefill.block_ids)[:, : prefill.length]
    values = gather(pages.values, prefill.block_ids)[:, : prefill.length]
    kind = variant.window, variant.is_causal
    if kind in prefill.masks:
        mask = prefill.masks[kind]
    else:
        mask = prefill.masks[kind] = _mask(query.shape[0], prefill.length, variant, query.device)
    sink_rows = None if sinks is None else sinks.view(1, -1, 1, 1)
    out = attend(query.transpose(0, 1)[None], keys[None], values[None], mask, variant, sink_rows)
    return out[0].transpose(0, 1)


def _mask(tokens: int, length: int, variant: Variant, device: torch.device) -> torch.Tensor | None:
    """[tokens, length] bool, the tokens being the last ones; None where torch's own flag says the same."""
    window = variant.window
    if tokens == length and (window is None or window >= length):
        return None
    at = torch.arange(length - tokens, length, device=device)[:, None]
    positions = torch.arange(length, device=device)
    visible = positions <= at if variant.is_causal else positions < at + (window or length)
    if window is not None:
        visible &= positions > at - window
    return visible


def _for_every_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value with a head for each query head."""
    repeat = query.shape[1] // key.shape[1]
    if repeat == 1:
        return key, value
    return key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    variant: Variant,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    key, value = _for_every_head(query, key, value)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None and variant.is_causal, scale=variant.scale
    )


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    variant: Variant,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    key, value = _for_every_head(query, key, value)
    scores = (query @ key.transpose(-1, -2)).to(
        torch.promote_types(query.dtype, torch.float32)
    ) * variant.scale
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    if mask is None and variant.is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        # A sink is one more column that takes probability and gives no value.
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        scores = scores.softmax(-1)
    return scores.to(value.dtype) @ value
