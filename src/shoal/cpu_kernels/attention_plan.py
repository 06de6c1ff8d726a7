"""A step's attention cut into items of even cost for a number of threads. Knows no number but lengths.

How a step is cut changes who computes what and when, never a result: rows do not see each other, and a row's
key blocks are the same however many items share them.
"""

from __future__ import annotations

from shoal.cpu_kernels import attention_arguments as at
from shoal.cpu_kernels.memory import load_int64, store_int64
from shoal.jit.compile import kernel

__all__ = ["ITEMS_PER_THREAD", "plan_items"]

ITEMS_PER_THREAD = 4
"""An item costs at most this part of a thread's share, but for a single key block."""

# What a key costs beside its products with the rows: it is read from memory and turned.
_KEY_COST = 16


@kernel
def plan_items(
    sequences: int, num_sequences: int, heads: int, group: int, window: int, together: int, threads: int,
    items: int, bounds: int, merges: int,
) -> int:  # fmt: skip
    """Lay out a step.

    Args:
        sequences: address of the sequences (:mod:`.attention_arguments`).
        window: as in a call (:data:`.attention_arguments.WINDOW`).
        together: KV heads that an item may have.
        items: room for ``tiles * heads + 2 * ITEMS_PER_THREAD * (threads + heads)`` items, with a tile for
            each TILE_ROWS rows of a sequence.
        bounds: room for ``threads + 2`` int64; bounds[threads + 1] becomes the number of merges.
        merges: room for ``tiles * heads`` items.

    Returns:
        records of partial results that are needed.
    """
    total = _total_cost(sequences, num_sequences, heads, group, window)
    most = max(1, total // (ITEMS_PER_THREAD * threads))
    num_items, num_merges, records, spent, thread = 0, 0, 0, 0, 0
    store_int64(bounds, 0, 0)
    for number in range(num_sequences):
        sequence = sequences + 8 * at.SEQUENCE_LENGTH * number
        rows = load_int64(sequence, at.NUM_TOKENS) * group
        for first_row in range(0, rows, at.TILE_ROWS):
            tile_rows = min(at.TILE_ROWS, rows - first_row)
            first_key, last_key = _keys(sequence, group, window, first_row, tile_rows)
            first, last = first_key // at.KEY_BLOCK, -(-last_key // at.KEY_BLOCK)
            key_cost = tile_rows + _KEY_COST
            blocks, cost = last - first, heads * (last_key - first_key) * key_cost
            splits = _head_splits(heads, tile_rows, together, threads if cost > most else 1, blocks)
            pieces = min(blocks, -(-cost // (splits * most))) if threads > 1 else 1
            for split in range(splits):
                head = heads * split // splits
                num_heads = heads * (split + 1) // splits - head
                rows_together = num_heads * tile_rows
                for piece in range(pieces):
                    begin = first + blocks * piece // pieces
                    end = first + blocks * (piece + 1) // pieces
                    record = records + (begin - first) * rows_together if pieces > 1 else -1
                    item = items + 8 * at.ITEM_LENGTH * num_items
                    _describe(item, number, head, num_heads, first_row, tile_rows, begin, end, record)
                    keys = min(end * at.KEY_BLOCK, last_key) - max(begin * at.KEY_BLOCK, first_key)
                    cost = num_heads * keys * key_cost
                    # An item goes to the thread in whose share its middle lies.
                    while thread < threads - 1 and (spent + cost // 2) * threads >= total * (thread + 1):
                        thread += 1
                        store_int64(bounds, thread, num_items)
                    spent, num_items = spent + cost, num_items + 1
                if pieces > 1:
                    item = merges + 8 * at.ITEM_LENGTH * num_merges
                    _describe(item, number, head, num_heads, first_row, tile_rows, first, last, records)
                    records, num_merges = records + blocks * rows_together, num_merges + 1
    while thread < threads:
        thread += 1
        store_int64(bounds, thread, num_items)
    store_int64(bounds, threads + 1, num_merges)
    return records


@kernel
def _head_splits(heads: int, rows: int, together: int, threads: int, blocks: int) -> int:
    """In how many parts a tile's heads are dealt.

    Heads lie side by side in the pages: so an item has as many as may go together, and fewer only where there
    are too few key blocks for the threads that should share them.
    """
    splits = -(-heads // max(1, min(together, at.TILE_ROWS // rows)))
    return min(heads, max(splits, threads)) if blocks < 2 * threads else splits


@kernel
def _total_cost(sequences: int, num_sequences: int, heads: int, group: int, window: int) -> int:
    total = 0
    for number in range(num_sequences):
        sequence = sequences + 8 * at.SEQUENCE_LENGTH * number
        rows = load_int64(sequence, at.NUM_TOKENS) * group
        for first_row in range(0, rows, at.TILE_ROWS):
            tile_rows = min(at.TILE_ROWS, rows - first_row)
            first_key, last_key = _keys(sequence, group, window, first_row, tile_rows)
            total += heads * (last_key - first_key) * (tile_rows + _KEY_COST)
    return total


@kernel
def _keys(sequence: int, group: int, window: int, first_row: int, rows: int) -> tuple[int, int]:
    """The positions that a tile's rows see: from the first that the first row sees to the last row's last."""
    length = load_int64(sequence, at.LENGTH)
    start = length - load_int64(sequence, at.NUM_TOKENS)
    first = max(0, start + first_row // group - abs(window) + 1) if window != 0 else 0
    last = start + (first_row + rows - 1) // group
    return first, last + 1 if window >= 0 else min(length, last - window)


@kernel
def _describe(
    item: int, sequence: int, head: int, num_heads: int, first_row: int, rows: int, begin: int, end: int,
    record: int,
) -> None:  # fmt: skip
    store_int64(item, at.SEQUENCE, sequence)
    store_int64(item, at.HEAD, head)
    store_int64(item, at.NUM_HEADS, num_heads)
    store_int64(item, at.FIRST_ROW, first_row)
    store_int64(item, at.NUM_ROWS, rows)
    store_int64(item, at.FIRST_BLOCK, begin)
    store_int64(item, at.LAST_BLOCK, end)
    store_int64(item, at.PARTIAL_RECORD, record)
