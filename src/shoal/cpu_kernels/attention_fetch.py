"""Where a block's keys and values lie, and reading them before they are needed. Knows no product.

Processors recognise streams of lines by the loads that miss, and go on by themselves far beyond what may miss
at once. No prefetch instruction makes them do so, and some are dropped where there are many. So lines are
loaded, and nothing is made of them. A block is read as eight streams side by side, each through all heads of
an item: that hides how long a stream takes to be recognised where a page begins.
"""

from __future__ import annotations

from typing import Any

from shoal.cpu_kernels import attention_arguments as at
from shoal.cpu_kernels.attention_vectors import touch, vector_lanes
from shoal.cpu_kernels.memory import load_int64, store_int64
from shoal.jit.compile import kernel

__all__ = [
    "end_visible",
    "fetch_share",
    "find_slots",
    "first_visible",
    "row_position",
    "seen_keys",
]

_LINE_BYTES = 64
_APART = at.KEY_BLOCK // 8  # keys from one stream to the next


@kernel
def row_position(call: int, item: int, row: int) -> Any:
    """The position that a row of the item's tile stands at."""
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    token = (load_int64(item, at.FIRST_ROW) + row) // load_int64(call, at.GROUP)
    return load_int64(sequence, at.LENGTH) - load_int64(sequence, at.NUM_TOKENS) + token


@kernel(inline="always")
def first_visible(call: int, position: int) -> Any:
    """The first position that a query at ``position`` sees."""
    window = abs(load_int64(call, at.WINDOW))
    return max(0, position - window + 1) if window > 0 else 0


@kernel(inline="always")
def end_visible(call: int, item: int, position: int) -> Any:
    """The position behind the last that a query at ``position`` sees."""
    window = load_int64(call, at.WINDOW)
    if window >= 0:
        return position + 1
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    return min(load_int64(sequence, at.LENGTH), position - window)


@kernel
def seen_keys(call: int, item: int, block: int) -> tuple[int, int]:
    """The first of a block's keys that any of the item's rows sees, and the one behind the last."""
    start = block * at.KEY_BLOCK
    first = first_visible(call, row_position(call, item, 0)) - start
    end = end_visible(call, item, row_position(call, item, load_int64(item, at.NUM_ROWS) - 1)) - start
    return max(0, first), min(at.KEY_BLOCK, end)


@kernel
def find_slots(call: int, item: int, block: int, first: int, last: int, slots: int) -> None:
    """The slot of each of a block's keys from ``first`` to ``last``, widened to whole tiles of keys.

    Where a tile reaches beyond ``last`` the last slot stands in: readable, and masked later.
    """
    sequence = load_int64(call, at.SEQUENCES) + 8 * at.SEQUENCE_LENGTH * load_int64(item, at.SEQUENCE)
    table, size = load_int64(sequence, at.TABLE), load_int64(call, at.BLOCK_SIZE)
    tile = 2 * vector_lanes()
    key = first - first % tile
    page, offset = (block * at.KEY_BLOCK + key) // size, (block * at.KEY_BLOCK + key) % size
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


@kernel
def fetch_share(call: int, item: int, slots: int, first: int, last: int, step: int, steps: int) -> None:
    """Part ``step`` of ``steps`` of reading a block's keys ``first`` to ``last``, then their values."""
    for number in range(2 * _APART * step // steps, 2 * _APART * (step + 1) // steps):
        which = at.KEYS if number < _APART else at.VALUES
        _read_streams(call, item, slots, first, last, number % _APART, which)


@kernel
def _read_streams(call: int, item: int, slots: int, first: int, last: int, number: int, which: int) -> None:
    """Read one row of each stream, under all of the item's heads."""
    head_stride, heads = load_int64(call, which + 2), load_int64(item, at.NUM_HEADS)
    width = load_int64(call, at.KEY_WIDTH if which == at.KEYS else at.VALUE_WIDTH)
    row_bytes = width * (2 if load_int64(call, at.PAGE_KIND) else 4)
    if head_stride == row_bytes:
        row_bytes, heads = heads * row_bytes, 1
    where = slots, first, last, load_int64(call, which + 1)
    start = load_int64(call, which) + load_int64(item, at.HEAD) * head_stride
    for head in range(heads):
        of_head = start + head * head_stride
        a, b = _row(of_head, number, where), _row(of_head, number + _APART, where)
        c, d = _row(of_head, number + 2 * _APART, where), _row(of_head, number + 3 * _APART, where)
        e, f = _row(of_head, number + 4 * _APART, where), _row(of_head, number + 5 * _APART, where)
        g, h = _row(of_head, number + 6 * _APART, where), _row(of_head, number + 7 * _APART, where)
        for offset in range(0, row_bytes, _LINE_BYTES):
            touch(a + offset)
            touch(b + offset)
            touch(c + offset)
            touch(d + offset)
            touch(e + offset)
            touch(f + offset)
            touch(g + offset)
            touch(h + offset)


@kernel(inline="always")
def _row(start: int, key: int, where: tuple[int, int, int, int]) -> Any:
    """The address of a key's row, or of the nearest that is seen."""
    slots, first, last, stride = where
    return start + load_int64(slots, min(max(key, first), last - 1)) * stride
