"""A step's batch cut in two that take about equally long. Knows no layer and no kernel.

The cut may go through a prompt's chunk: its second part sees the pages that the first part has written, if in
every layer the first half's attention runs before the second's.
"""

from __future__ import annotations

import numpy

from shoal.attention.base import AttentionBatch, DecodeGroup, Prefill

__all__ = ["choose_cut", "cut_batch"]

# A layer of width W multiplies each row by about 12 W² numbers, and by 2 W for each position it sees.
_POSITIONS_PER_WIDTH = 6


def choose_cut(batch: AttentionBatch, width: int) -> int:
    """The row that the second half begins with: the same on every rank, whatever its part of the model.

    Args:
        batch: of at least one row.
        width: features of a layer's input.
    """
    seen = [numpy.empty(0, numpy.int64) if batch.decode is None else batch.decode.lengths.numpy()]
    seen += [numpy.arange(p.length - (p.stop - p.start), p.length) + 1 for p in batch.prefills]
    costs = numpy.concatenate(seen) + _POSITIONS_PER_WIDTH * width
    middles = costs.cumsum() - costs / 2
    return int(numpy.searchsorted(middles, costs.sum() / 2))


def cut_batch(batch: AttentionBatch, row: int) -> tuple[AttentionBatch, AttentionBatch]:
    """The rows before ``row``, and the others, numbered from 0 again."""
    first, second = _cut(batch, row)
    if batch.windowed is not None:
        first.windowed, second.windowed = _cut(batch.windowed, row)
    return first, second


def _cut(batch: AttentionBatch, row: int) -> tuple[AttentionBatch, AttentionBatch]:
    group, prefills = batch.decode, batch.prefills
    singles = 0 if group is None else min(group.size, row)
    first = AttentionBatch(
        batch.slots[:row],
        DecodeGroup(group.block_table[:singles], group.lengths[:singles]) if group and singles else None,
        [_upto(prefill, row) for prefill in prefills if prefill.start < row],
    )
    rest = 0 if group is None else group.size - singles
    second = AttentionBatch(
        batch.slots[row:],
        DecodeGroup(group.block_table[singles:], group.lengths[singles:]) if group and rest else None,
        [_since(prefill, row) for prefill in prefills if prefill.stop > row],
    )
    return first, second


def _upto(prefill: Prefill, row: int) -> Prefill:
    stop = min(prefill.stop, row)
    return Prefill(prefill.start, stop, prefill.block_ids, prefill.length - (prefill.stop - stop))


def _since(prefill: Prefill, row: int) -> Prefill:
    start = max(prefill.start, row) - row
    return Prefill(start, prefill.stop - row, prefill.block_ids, prefill.length)
