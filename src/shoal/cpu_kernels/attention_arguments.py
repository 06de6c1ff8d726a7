"""How attention's kernels are told what to do: the places of a call's numbers. Knows no tensor.

A call is an array of int64; a kernel gets its address. Addresses and strides are in bytes, widths in
elements, kinds are 0 for float32 and 1 for bfloat16. Shape letters as in :mod:`shoal.attention.base`.
"""

from __future__ import annotations

KEY_BLOCK = 128
"""Positions whose scores are computed together. Blocks begin at its multiples, whatever the batch, and each
gives a partial result of its own; a row is the merge of its blocks in order. So neither chunks of a prompt
nor threads that share a long context change a bit of it."""

TILE_ROWS = 48
"""Rows (tokens times the query heads of one KV head) that go together: eight full groups of a product."""

TOGETHER_BYTES = 1 << 18
"""What the keys and values of a block that an item reads may take at most, beyond one head's: while they are
worked on the next ones are fetched, and both should fit into a core's own cache."""

# A call of the attention kernels.
QUERY, QUERY_TOKEN_STRIDE, QUERY_HEAD_STRIDE, QUERY_KIND = 0, 1, 2, 3  # [T, Hq, Ek]
KEYS, KEY_SLOT_STRIDE, KEY_HEAD_STRIDE = 4, 5, 6  # [N * S, H, Ek]
VALUES, VALUE_SLOT_STRIDE, VALUE_HEAD_STRIDE = 7, 8, 9  # [N * S, H, Ev]
PAGE_KIND = 10
OUT, OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE, OUT_KIND = 11, 12, 13, 14  # [T, Hq, Ev]
HEADS, GROUP, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE = 15, 16, 17, 18, 19  # GROUP: query heads of a KV head
SCALE, SOFTCAP = 20, 21  # bits of a float32; a cap of 0.0 is none
WINDOW = 22  # positions that a query sees back, itself included; 0: all; less than 0: as many back and ahead
SINKS, SLOPES = 23, 24  # float32 [Hq]; 0: none
SEQUENCES, NUM_SEQUENCES = 25, 26
ITEMS, BOUNDS = 27, 28  # thread t's items are BOUNDS[t] .. BOUNDS[t + 1]
MERGES, NUM_MERGES = 29, 30
PARTIALS = 31
SCRATCH, SCRATCH_STRIDE = 32, 33  # thread t's scratch is at SCRATCH + t * SCRATCH_STRIDE
RECORD_STRIDE = 34  # of one row's partial result: values, their maximum, their sum
BARRIER, SPIN_NS = 35, 36
QUERY_ROWS, COLUMNS, WEIGHTS, SLOTS, TOTAL, PARTIAL = 37, 38, 39, 40, 41, 42  # offsets in a thread's scratch
CALL_LENGTH = 43

# A sequence.
FIRST_TOKEN, NUM_TOKENS, LENGTH, TABLE = 0, 1, 2, 3  # TABLE: int64 block ids
SEQUENCE_LENGTH = 4

# An item: rows of one sequence under each of some KV heads that lie side by side, over some of their key
# blocks; a merge: the same over all.
SEQUENCE, HEAD, FIRST_ROW, NUM_ROWS, FIRST_BLOCK, LAST_BLOCK = 0, 1, 2, 3, 4, 5
PARTIAL_RECORD = (
    6  # the first head's first row's, of the first block; -1: the item is whole and merges as it goes
)
NUM_HEADS = 7
ITEM_LENGTH = 8

# A call of the kernel that writes pages: these for the keys, the same for the values, then the rest.
NEW, NEW_TOKEN_STRIDE, NEW_HEAD_STRIDE = 0, 1, 2  # [T, H, E]
PAGE, PAGE_SLOT_STRIDE, PAGE_HEAD_STRIDE = 3, 4, 5  # [N * S, H, E]
WIDTH = 6
WRITE_HALF_LENGTH = 7
NEW_KIND, WRITE_PAGE_KIND, WRITE_HEADS, TOKEN_SLOTS, NUM_NEW = 14, 15, 16, 17, 18  # TOKEN_SLOTS: int64 [T]
WRITE_LENGTH = 19
