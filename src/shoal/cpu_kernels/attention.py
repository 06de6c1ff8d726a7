"""Paged attention of a ragged batch, and the writing of pages, as kernels that any number of threads share.

Knows no tensor and no thread: a part is given its number and the address of a call
(:mod:`shoal.cpu_kernels.attention_arguments`). The work of a step is laid out by
:mod:`shoal.cpu_kernels.attention_plan`.
"""

from __future__ import annotations

from typing import Any

from shoal.cpu_kernels import attention_arguments as at
from shoal.cpu_kernels.attention_block import attend_block, finish_rows, load_queries, merge_rows
from shoal.cpu_kernels.attention_products import load_item
from shoal.cpu_kernels.memory import load_int64, store_bfloat16, store_float32
from shoal.jit.barrier import meet
from shoal.jit.compile import kernel
from shoal.jit.waiting import FOREVER

__all__ = ["attend", "attend_items", "merge_items", "write_pages"]


@kernel(fastmath=False)
def attend(index: int, count: int, call: int) -> int:
    """Part ``index`` of ``count`` of a call; the parts meet where long contexts were shared. Status 0, or
    the barrier's. ``count`` must be the threads that the items were dealt to."""
    attend_items(index, count, call)
    if load_int64(call, at.NUM_MERGES) == 0:
        return 0
    status = meet(load_int64(call, at.BARRIER), count, 0, load_int64(call, at.SPIN_NS), FOREVER)
    return merge_items(index, count, call) if status == 0 else status


@kernel(fastmath=False)
def attend_items(index: int, count: int, call: int) -> int:
    """This part's items: whole ones are finished, the others leave a partial result for each key block."""
    scratch = load_int64(call, at.SCRATCH) + index * load_int64(call, at.SCRATCH_STRIDE)
    total, partial = scratch + load_int64(call, at.TOTAL), scratch + load_int64(call, at.PARTIAL)
    slots = scratch + load_int64(call, at.SLOTS)
    then_slots, is_known = slots + 8 * at.KEY_BLOCK, False
    bounds, items = load_int64(call, at.BOUNDS), load_int64(call, at.ITEMS)
    last_item = load_int64(bounds, index + 1)
    for number in range(load_int64(bounds, index), last_item):
        item = items + 8 * at.ITEM_LENGTH * number
        rows = load_int64(item, at.NUM_HEADS) * load_int64(item, at.NUM_ROWS)
        is_whole = load_int64(item, at.PARTIAL_RECORD) < 0
        first, last = load_int64(item, at.FIRST_BLOCK), load_int64(item, at.LAST_BLOCK)
        load_queries(call, item, scratch)
        for block in range(first, last):
            then, then_block = item, block + 1
            if then_block == last:
                then = item + 8 * at.ITEM_LENGTH if number + 1 < last_item else 0
                then_block = load_int64(then, at.FIRST_BLOCK) if then != 0 else 0
            if is_whole:
                out = total if block == first else partial
            else:
                out = _record(call, load_int64(item, at.PARTIAL_RECORD) + (block - first) * rows)
            attend_block(call, item, scratch, block, out, slots, is_known, then, then_block, then_slots)
            slots, then_slots, is_known = then_slots, slots, True
            if is_whole and block > first:
                merge_rows(call, rows, total, partial)
        if is_whole:
            finish_rows(call, item, 0, rows, total)
    return 0


@kernel(fastmath=False, inline="always")
def _record(call: int, number: int) -> Any:
    return load_int64(call, at.PARTIALS) + number * load_int64(call, at.RECORD_STRIDE)


@kernel(fastmath=False)
def merge_items(index: int, count: int, call: int) -> int:
    """Every ``count``-th row of what is to be merged: its blocks' results in order, into the first, and
    finish it."""
    stride, merges = load_int64(call, at.RECORD_STRIDE), load_int64(call, at.MERGES)
    before = 0
    for number in range(load_int64(call, at.NUM_MERGES)):
        item = merges + 8 * at.ITEM_LENGTH * number
        rows = load_int64(item, at.NUM_HEADS) * load_int64(item, at.NUM_ROWS)
        blocks = load_int64(item, at.LAST_BLOCK) - load_int64(item, at.FIRST_BLOCK)
        first = _record(call, load_int64(item, at.PARTIAL_RECORD))
        for row in range((index - before) % count, rows, count):
            total = first + row * stride
            for block in range(1, blocks):
                merge_rows(call, 1, total, total + block * rows * stride)
            finish_rows(call, item, row, row + 1, first)
        before += rows
    return 0


@kernel(fastmath=False)
def write_pages(index: int, count: int, call: int) -> int:
    """Part ``index`` of ``count`` of putting a step's keys and values into the pages, by tokens."""
    tokens, heads = load_int64(call, at.NUM_NEW), load_int64(call, at.WRITE_HEADS)
    kind, page_kind = load_int64(call, at.NEW_KIND), load_int64(call, at.WRITE_PAGE_KIND)
    for token in range(tokens * index // count, tokens * (index + 1) // count):
        slot = load_int64(load_int64(call, at.TOKEN_SLOTS), token)
        for half in range(2):  # keys, then values: the same fields in the same order
            field = call + 8 * half * at.WRITE_HALF_LENGTH
            source = load_int64(field, at.NEW) + token * load_int64(field, at.NEW_TOKEN_STRIDE)
            out = load_int64(field, at.PAGE) + slot * load_int64(field, at.PAGE_SLOT_STRIDE)
            for head in range(heads):
                _copy(
                    out + head * load_int64(field, at.PAGE_HEAD_STRIDE), page_kind,
                    source + head * load_int64(field, at.NEW_HEAD_STRIDE), kind, load_int64(field, at.WIDTH),
                )  # fmt: skip
    return 0


@kernel(fastmath=False)
def _copy(out: int, out_kind: int, source: int, kind: int, width: int) -> None:
    if out_kind == 0 and kind == 0:
        for column in range(width):
            store_float32(out, column, load_item(source, column, 0))
    elif out_kind == 0:
        for column in range(width):
            store_float32(out, column, load_item(source, column, 1))
    elif kind == 0:
        for column in range(width):
            store_bfloat16(out, column, load_item(source, column, 0))
    else:
        for column in range(width):
            store_bfloat16(out, column, load_item(source, column, 1))
