"""One tile of rows, under some KV heads, against one block of keys, and what is made of such partial results.
Knows no batch.

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
from shoal.cpu_kernels.attention_fetch import (
    end_visible,
    fetch_share,
    find_slots,
    first_visible,
    row_position,
    seen_keys,
)
from shoal.cpu_kernels.attention_products import load_item, score_product, transpose_tile, value_product
from shoal.cpu_kernels.attention_scores import MOST_QUERIES, score_few
from shoal.cpu_kernels.attention_vectors import (
    blend_vectors,
    exponentials,
    largest,
    softcap_vectors,
    vector_lanes,
)
from shoal.cpu_kernels.memory import load_float32, load_int64, store_bfloat16, store_float32
from shoal.jit.compile import kernel

__all__ = ["attend_block", "finish_rows", "load_queries", "merge_rows"]

_WEIGHT_STRIDE = 4 * at.KEY_BLOCK
_FEW_ROWS = 12  # up to so many rows a block waits for memory, not for arithmetic
_NOTHING = np.float32(-np.inf)


@kernel(fastmath=False, inline="always")
def _float_argument(call: int, which: int) -> Any:
    """A call's argument that is a float32."""
    return load_float32(call + 8 * which, 0)


@kernel(fastmath=False)
def load_queries(call: int, item: int, scratch: int) -> None:
    """The tile's queries under each head, times the scale, into scratch as float32."""
    group, width = load_int64(call, at.GROUP), load_int64(call, at.KEY_WIDTH)
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    scale, kind = _float_argument(call, at.SCALE), load_int64(call, at.QUERY_KIND)
    rows = load_int64(item, at.NUM_ROWS)
    for number in range(load_int64(item, at.NUM_HEADS) * rows):
        flat = load_int64(item, at.FIRST_ROW) + number % rows
        token = load_int64(sequence, at.FIRST_TOKEN) + flat // group
        head = (load_int64(item, at.HEAD) + number // rows) * group + flat % group
        source = load_int64(call, at.QUERY) + token * load_int64(call, at.QUERY_TOKEN_STRIDE)
        source += head * load_int64(call, at.QUERY_HEAD_STRIDE)
        out = scratch + load_int64(call, at.QUERY_ROWS) + 4 * number * width
        if kind:
            for column in range(width):
                store_float32(out, column, load_item(source, column, 1) * scale)
        else:
            for column in range(width):
                store_float32(out, column, load_item(source, column, 0) * scale)


@kernel(fastmath=False)
def attend_block(
    call: int, item: int, scratch: int, block: int, out: int, slots: int, is_known: bool,
    then: int, then_block: int, then_slots: int,
) -> None:  # fmt: skip
    """Partial results of the tile's rows over one key block, under one head after the other.

    Args:
        block: its number; its first position is ``block * KEY_BLOCK``.
        out: address of the first head's first row's record; the others follow.
        slots: room for the slots of a block's keys.
        is_known: they are there already, and what lies in them has been fetched.
        then, then_block: the item and block that come next, whose slots go to ``then_slots`` and which is
            fetched meanwhile; 0: none.
    """
    rows, heads = load_int64(item, at.NUM_ROWS), load_int64(item, at.NUM_HEADS)
    first, last = seen_keys(call, item, block)
    then_first, then_last = 0, 0
    if not is_known:
        find_slots(call, item, block, first, last, slots)
    if then != 0:
        then_first, then_last = seen_keys(call, then, then_block)
        find_slots(call, then, then_block, then_first, then_last, then_slots)
    waits, tile = rows <= _FEW_ROWS, 2 * vector_lanes()
    if waits and not is_known:
        fetch_share(call, item, slots, first, last, 0, 1)
    width, kind, record = (
        load_int64(call, at.VALUE_WIDTH), load_int64(call, at.PAGE_KIND), load_int64(call, at.RECORD_STRIDE)
    )  # fmt: skip
    weights, stride = scratch + load_int64(call, at.WEIGHTS), load_int64(call, at.VALUE_SLOT_STRIDE)
    values = load_int64(call, at.VALUES) + load_int64(item, at.HEAD) * load_int64(call, at.VALUE_HEAD_STRIDE)
    tiles = -(-last // tile) - first // tile
    for head in range(heads):
        for number in range(tiles):
            if waits and then != 0:
                step = head * tiles + number
                fetch_share(call, then, then_slots, then_first, then_last, step, heads * tiles)
            _compute_scores(call, item, head, scratch, slots, first - first % tile + number * tile)
        own = out + head * rows * record
        for row in range(rows):
            maximum = own + row * record + record - 8
            _weigh(call, item, head, row, block, first, last, weights + row * _WEIGHT_STRIDE, maximum)
        value_product(
            rows, weights, _WEIGHT_STRIDE, first, last, values, stride, slots, width, kind, own, record
        )
        values += load_int64(call, at.VALUE_HEAD_STRIDE)


@kernel(fastmath=False)
def _compute_scores(call: int, item: int, head: int, scratch: int, slots: int, key: int) -> None:
    """Scores of the tile's rows under one head against the tile of keys from ``key`` on."""
    rows, width = load_int64(item, at.NUM_ROWS), load_int64(call, at.KEY_WIDTH)
    queries = scratch + load_int64(call, at.QUERY_ROWS) + 4 * head * rows * width
    out, own = scratch + load_int64(call, at.WEIGHTS) + 4 * key, slots + 8 * key
    keys = load_int64(call, at.KEYS)
    keys += (load_int64(item, at.HEAD) + head) * load_int64(call, at.KEY_HEAD_STRIDE)
    stride, kind = load_int64(call, at.KEY_SLOT_STRIDE), load_int64(call, at.PAGE_KIND)
    if rows <= MOST_QUERIES:
        score_few(rows, queries, 4 * width, width, own, keys, stride, kind, out, _WEIGHT_STRIDE)
    else:
        columns = scratch + load_int64(call, at.COLUMNS)
        transpose_tile(own, keys, stride, width, kind, columns)
        score_product(rows, queries, 4 * width, width, columns, out, _WEIGHT_STRIDE)


@kernel(fastmath=False)
def _weigh(
    call: int, item: int, head: int, row: int, block: int, first: int, last: int, weights: int, maximum: int
) -> None:
    """A row's scores become its weights, exp(score - largest); the largest and the sum go to ``maximum``."""
    lanes = vector_lanes()
    begin, end, start = first - first % lanes, last + (-last) % lanes, block * at.KEY_BLOCK
    count = end - begin
    position = row_position(call, item, row)
    low = max(first, first_visible(call, position) - start)
    high = min(last, end_visible(call, item, position) - start)
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
        _add_distances(call, item, head, row, start - position, low, high, weights)
    for key in range(begin, low):
        store_float32(weights, key, _NOTHING)
    for key in range(high, end):
        store_float32(weights, key, _NOTHING)
    best = largest(weights + 4 * begin, count)
    sum_ = exponentials(weights + 4 * begin, count, best)
    store_float32(maximum, 0, best if sum_ == sum_ else sum_)  # a row with a NaN has seen something
    store_float32(maximum, 1, sum_)


@kernel(fastmath=False)
def _add_distances(
    call: int, item: int, head: int, row: int, shift: int, low: int, high: int, weights: int
) -> None:
    """ALiBi: the head's slope times (key's position - query's), which is ``key + shift``."""
    group = load_int64(call, at.GROUP)
    query_head = (load_int64(item, at.HEAD) + head) * group + (load_int64(item, at.FIRST_ROW) + row) % group
    slope = load_float32(load_int64(call, at.SLOPES), query_head)
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
def finish_rows(call: int, item: int, first: int, last: int, total: int) -> None:
    """Divide by the sum of weights, the sink's among them, and write the result; 0 where nothing was seen.

    Args:
        first, last: of the item's rows, those of one head behind those of another.
        total: address of row 0's record.
    """
    record, width = load_int64(call, at.RECORD_STRIDE), load_int64(call, at.VALUE_WIDTH)
    group, sinks, rows = load_int64(call, at.GROUP), load_int64(call, at.SINKS), load_int64(item, at.NUM_ROWS)
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    for number in range(first, last):
        flat = load_int64(item, at.FIRST_ROW) + number % rows
        head = (load_int64(item, at.HEAD) + number // rows) * group + flat % group
        token = load_int64(sequence, at.FIRST_TOKEN) + flat // group
        source = total + number * record
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
