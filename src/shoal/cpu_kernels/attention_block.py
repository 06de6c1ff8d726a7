"""One tile of rows against one block of keys, and what is made of such partial results. Knows no batch.

The softmax is online: a block gives each row its values weighted by exp(score - m), the sum of the weights
and m, the row's largest score in the block. Two such results merge into one; a row that sees nothing of a
block leaves it alone. ``call``: the address of a call, ``item``: of an item, ``scratch``: of a thread's
scratch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.cpu_kernels import attention_arguments as at
from shoal.cpu_kernels.attention_products import load_item, score_product, transpose_tile, value_product
from shoal.cpu_kernels.attention_vectors import (
    blend_vectors,
    exponentials,
    largest,
    prefetch,
    softcap_vectors,
    vector_lanes,
)
from shoal.cpu_kernels.memory import load_float32, load_int64, store_bfloat16, store_float32, store_int64
from shoal.jit.compile import kernel

__all__ = ["attend_block", "finish_rows", "load_queries", "merge_rows"]

_WEIGHT_STRIDE = 4 * at.KEY_BLOCK
_LINE_BYTES = 64
_FEW_ROWS = 12  # up to so many rows a block waits for memory, not for arithmetic
_NOTHING = np.float32(-np.inf)


@kernel(fastmath=False, inline="always")
def _float_argument(call: int, which: int) -> Any:
    """A call's argument that is a float32."""
    return load_float32(call + 8 * which, 0)


@kernel(fastmath=False)
def _row_position(call: int, item: int, row: int) -> Any:
    """The position that a row of the item's tile stands at."""
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    token = (load_int64(item, at.FIRST_ROW) + row) // load_int64(call, at.GROUP)
    return load_int64(sequence, at.LENGTH) - load_int64(sequence, at.NUM_TOKENS) + token


@kernel(fastmath=False, inline="always")
def _first_visible(call: int, position: int) -> Any:
    """The first position that a query at ``position`` sees."""
    window = abs(load_int64(call, at.WINDOW))
    return max(0, position - window + 1) if window > 0 else 0


@kernel(fastmath=False, inline="always")
def _end_visible(call: int, item: int, position: int) -> Any:
    """The position behind the last that a query at ``position`` sees."""
    window = load_int64(call, at.WINDOW)
    if window >= 0:
        return position + 1
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    return min(load_int64(sequence, at.LENGTH), position - window)


@kernel(fastmath=False)
def load_queries(call: int, item: int, scratch: int) -> None:
    """The tile's queries, times the scale, into scratch as float32."""
    group, width = load_int64(call, at.GROUP), load_int64(call, at.KEY_WIDTH)
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    scale, kind = _float_argument(call, at.SCALE), load_int64(call, at.QUERY_KIND)
    for row in range(load_int64(item, at.NUM_ROWS)):
        flat = load_int64(item, at.FIRST_ROW) + row
        token = load_int64(sequence, at.FIRST_TOKEN) + flat // group
        head = load_int64(item, at.HEAD) * group + flat % group
        source = load_int64(call, at.QUERY) + token * load_int64(call, at.QUERY_TOKEN_STRIDE)
        source += head * load_int64(call, at.QUERY_HEAD_STRIDE)
        out = scratch + load_int64(call, at.QUERY_ROWS) + 4 * row * width
        if kind:
            for column in range(width):
                store_float32(out, column, load_item(source, column, 1) * scale)
        else:
            for column in range(width):
                store_float32(out, column, load_item(source, column, 0) * scale)


@kernel(fastmath=False)
def attend_block(
    call: int, item: int, scratch: int, block: int, out: int, then: int, then_block: int
) -> None:
    """Partial results of the tile's rows over one key block.

    Args:
        block: its number; its first position is ``block * KEY_BLOCK``.
        out: address of the first row's record; the others follow.
        then, then_block: the item and block that come next, whose first keys are fetched meanwhile; 0: none.
    """
    rows, start, record = (
        load_int64(item, at.NUM_ROWS),
        block * at.KEY_BLOCK,
        load_int64(call, at.RECORD_STRIDE),
    )
    width, kind = load_int64(call, at.VALUE_WIDTH), load_int64(call, at.PAGE_KIND)
    seen = _end_visible(
        call, item, _row_position(call, item, rows - 1)
    )  # by the last row, which sees furthest
    first = max(0, _first_visible(call, _row_position(call, item, 0)) - start)
    last = min(at.KEY_BLOCK, seen - start)
    slots, weights = scratch + load_int64(call, at.SLOTS), scratch + load_int64(call, at.WEIGHTS)
    _find_slots(call, item, start, first, last, slots)
    _compute_scores(call, item, scratch, first, last)
    for row in range(rows):
        maximum = out + row * record + record - 8
        _weigh(call, item, row, start, first, last, weights + row * _WEIGHT_STRIDE, maximum)
    if then != 0 and rows <= _FEW_ROWS:
        _fetch_first_keys(call, then, then_block, slots + 8 * at.KEY_BLOCK)
    values = load_int64(call, at.VALUES) + load_int64(item, at.HEAD) * load_int64(call, at.VALUE_HEAD_STRIDE)
    stride = load_int64(call, at.VALUE_SLOT_STRIDE)
    value_product(rows, weights, _WEIGHT_STRIDE, first, last, values, stride, slots, width, kind, out, record)


@kernel(fastmath=False)
def _find_slots(call: int, item: int, start: int, first: int, last: int, slots: int) -> None:
    """The slot of each position of the block from ``first`` to ``last``, widened to whole tiles of keys.

    Where a tile reaches beyond ``last`` the last slot stands in: readable, and masked later.
    """
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    table, size = load_int64(sequence, at.TABLE), load_int64(call, at.BLOCK_SIZE)
    tile = 2 * vector_lanes()
    key = first - first % tile
    page, offset = (start + key) // size, (start + key) % size
    slot = load_int64(table, page) * size + offset
    while key < last:
        store_int64(slots, key, slot)
        key, offset, slot = key + 1, offset + 1, slot + 1
        if offset == size and key < last:
            page, offset = page + 1, 0
            slot = load_int64(table, page) * size
    while key % tile:
        store_int64(slots, key, load_int64(slots, last - 1))
        key += 1


@kernel(fastmath=False)
def _compute_scores(call: int, item: int, scratch: int, first: int, last: int) -> None:
    """Scores of the tile's rows against keys ``first`` to ``last``, in whole tiles of keys."""
    rows, width = load_int64(item, at.NUM_ROWS), load_int64(call, at.KEY_WIDTH)
    queries, columns = scratch + load_int64(call, at.QUERY_ROWS), scratch + load_int64(call, at.COLUMNS)
    slots, weights = scratch + load_int64(call, at.SLOTS), scratch + load_int64(call, at.WEIGHTS)
    keys = load_int64(call, at.KEYS) + load_int64(item, at.HEAD) * load_int64(call, at.KEY_HEAD_STRIDE)
    stride, kind = load_int64(call, at.KEY_SLOT_STRIDE), load_int64(call, at.PAGE_KIND)
    tile = 2 * vector_lanes()
    for key in range(first - first % tile, last, tile):
        if rows <= _FEW_ROWS:
            _fetch(call, item, slots + 8 * key, tile, at.VALUES)
            if key + tile < last:
                _fetch(call, item, slots + 8 * (key + tile), tile, at.KEYS)
        transpose_tile(slots + 8 * key, keys, stride, width, kind, columns)
        score_product(rows, queries, 4 * width, width, columns, weights + 4 * key, _WEIGHT_STRIDE)


@kernel
def _fetch(call: int, item: int, slots: int, count: int, which: int) -> None:
    """Have rows of the pages brought nearer; ``which`` is KEYS or VALUES."""
    slot_stride, head_stride = load_int64(call, which + 1), load_int64(call, which + 2)
    start = load_int64(call, which) + load_int64(item, at.HEAD) * head_stride
    for index in range(count):
        row = start + load_int64(slots, index) * slot_stride
        for offset in range(0, head_stride, _LINE_BYTES):
            prefetch(row + offset)


@kernel
def _fetch_first_keys(call: int, item: int, block: int, slots: int) -> None:
    """Have the first keys of an item's block brought nearer. ``slots``: room for a tile of them."""
    start = block * at.KEY_BLOCK
    first = max(0, _first_visible(call, _row_position(call, item, 0)) - start)
    seen = _end_visible(call, item, _row_position(call, item, load_int64(item, at.NUM_ROWS) - 1))
    tile = 2 * vector_lanes()
    begin, last = first - first % tile, min(first - first % tile + tile, seen - start)
    _find_slots(call, item, start, first, last, slots - 8 * begin)
    _fetch(call, item, slots, last - begin, at.KEYS)


@kernel(fastmath=False)
def _weigh(
    call: int, item: int, row: int, start: int, first: int, last: int, weights: int, maximum: int
) -> None:
    """A row's scores become its weights, exp(score - largest); the largest and the sum go to ``maximum``."""
    lanes = vector_lanes()
    begin, end = first - first % lanes, last + (-last) % lanes
    count = end - begin
    position = _row_position(call, item, row)
    low = max(first, _first_visible(call, position) - start)
    high = min(last, _end_visible(call, item, position) - start)
    if low >= high:
        for key in range(begin, end):
            store_float32(weights, key, np.float32(0.0))
        store_float32(maximum, 0, _NOTHING)
        store_float32(maximum, 1, np.float32(0.0))
        return
    softcap = _float_argument(call, at.SOFTCAP)
    if softcap != np.float32(0.0):
        softcap_vectors(weights + 4 * begin, count, softcap)
    if load_int64(call, at.SLOPES) != 0:
        _add_distances(call, item, row, start - position, low, high, weights)
    for key in range(begin, low):
        store_float32(weights, key, _NOTHING)
    for key in range(high, end):
        store_float32(weights, key, _NOTHING)
    best = largest(weights + 4 * begin, count)
    sum_ = exponentials(weights + 4 * begin, count, best)
    store_float32(maximum, 0, best if sum_ == sum_ else sum_)  # a row with a NaN has seen something
    store_float32(maximum, 1, sum_)


@kernel(fastmath=False)
def _add_distances(call: int, item: int, row: int, shift: int, low: int, high: int, weights: int) -> None:
    """ALiBi: the head's slope times (key's position - query's), which is ``key + shift``."""
    group = load_int64(call, at.GROUP)
    head = load_int64(item, at.HEAD) * group + (load_int64(item, at.FIRST_ROW) + row) % group
    slope = load_float32(load_int64(call, at.SLOPES), head)
    for key in range(low, high):
        store_float32(weights, key, load_float32(weights, key) + slope * np.float32(key + shift))


@kernel(fastmath=False)
def merge_rows(call: int, rows: int, total: int, partial: int) -> None:
    """Take partial results into ``total``: the records of ``rows`` rows each, one after the other."""
    record = load_int64(call, at.RECORD_STRIDE)
    count = record // 4 - vector_lanes()
    for row in range(rows):
        into, source = total + row * record, partial + row * record
        tail = record // 4 - 2
        old, new = load_float32(into, tail), load_float32(source, tail)
        if new == _NOTHING:
            continue
        if old == _NOTHING:
            for column in range(record // 4):
                store_float32(into, column, load_float32(source, column))
            continue
        best = old if old > new else new
        keep = np.float32(1.0) if best == old else np.float32(math.exp(old - best))
        take = np.float32(1.0) if best == new else np.float32(math.exp(new - best))
        blend_vectors(into, source, count, keep, take)
        store_float32(into, tail, best)
        store_float32(
            into, tail + 1, load_float32(into, tail + 1) * keep + load_float32(source, tail + 1) * take
        )


@kernel(fastmath=False)
def finish_rows(call: int, item: int, total: int) -> None:
    """Divide by the sum of weights, the sink's among them, and write the result; 0 where nothing was seen."""
    record, width = load_int64(call, at.RECORD_STRIDE), load_int64(call, at.VALUE_WIDTH)
    group, sinks = load_int64(call, at.GROUP), load_int64(call, at.SINKS)
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    for row in range(load_int64(item, at.NUM_ROWS)):
        flat = load_int64(item, at.FIRST_ROW) + row
        head = load_int64(item, at.HEAD) * group + flat % group
        token = load_int64(sequence, at.FIRST_TOKEN) + flat // group
        source = total + row * record
        best, sum_ = load_float32(source, record // 4 - 2), load_float32(source, record // 4 - 1)
        factor = np.float32(0.0)
        if best != _NOTHING and sinks == 0:
            factor = np.float32(1.0) / sum_
        elif best != _NOTHING:
            sink = load_float32(sinks, head)
            top = sink if sink > best else best
            kept = np.float32(math.exp(best - top))
            factor = kept / (sum_ * kept + np.float32(math.exp(sink - top)))
        out = load_int64(call, at.OUT) + token * load_int64(call, at.OUT_TOKEN_STRIDE)
        out += head * load_int64(call, at.OUT_HEAD_STRIDE)
        _write_row(out, load_int64(call, at.OUT_KIND), source, width, factor)


@kernel(fastmath=False)
def _write_row(out: int, kind: int, source: int, width: int, factor: Any) -> None:
    if factor == np.float32(0.0):  # a row that saw nothing: what stands in its record is not a result
        for column in range(width):
            if kind:
                store_bfloat16(out, column, np.float32(0.0))
            else:
                store_float32(out, column, np.float32(0.0))
    elif kind:
        for column in range(width):
            store_bfloat16(out, column, load_float32(source, column) * factor)
    else:
        for column in range(width):
            store_float32(out, column, load_float32(source, column) * factor)
