"""Block ids with reference counts, and the order in which free ones are used again.

Knows nothing of what a block holds, only whether its owner asked to *keep* the content for reuse.

A free block is either blank (nothing worth keeping, taken first, the last freed before the others) or
kept (its content stays usable until the block is taken; the least recently freed goes first)::

    take:  blank, last in first out  ->  kept, least recently freed first
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """``num_blocks`` ids, 0 to ``num_blocks - 1``. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"a pool needs at least one block, got {num_blocks}"
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """All blocks free and blank."""
        self._num_holders = array("i", bytes(4 * self.num_blocks))
        self._is_kept = bytearray(self.num_blocks)
        self._blank = list(range(self.num_blocks - 1, -1, -1))  # a stack: low ids first
        self._kept: OrderedDict[int, None] = OrderedDict()  # free and kept, least recently freed first

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, blank and kept."""
        return len(self._blank) + len(self._kept)

    @property
    def usage(self) -> float:
        """Share of blocks somebody holds, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def num_holders(self, block_id: int) -> int:
        """How many hold the block."""
        return self._num_holders[block_id]

    def take(self, count: int) -> list[int]:
        """``count`` free blocks, held once each. What a kept one held is lost: the caller forgets it."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blank = self._blank
        block_ids = []
        for _ in range(count):
            if blank:
                block_id = blank.pop()
            else:
                block_id, _none = self._kept.popitem(last=False)
                self._is_kept[block_id] = False
            self._num_holders[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more: blocks somebody holds, or free ones whose content was kept."""
        for block_id in block_ids:
            if self._num_holders[block_id] == 0:
                del self._kept[block_id]
            self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Hold blocks once less, the last of the sequence first.

        Of a prefix's kept blocks the tail is thus used again before the head it depends on.
        """
        for block_id in reversed(block_ids):
            left = self._num_holders[block_id] - 1
            assert left >= 0, f"block {block_id} released, and nobody holds it"
            self._num_holders[block_id] = left
            if left == 0:
                if self._is_kept[block_id]:
                    self._kept[block_id] = None
                else:
                    self._blank.append(block_id)

    def keep(self, block_id: int) -> None:
        """Keep a held block's content usable after its release, until the block is taken again."""
        assert self._num_holders[block_id] > 0, f"block {block_id} is free: there is nothing to keep"
        self._is_kept[block_id] = True

    def discard(self, block_id: int) -> None:
        """What a kept block holds is of no use to anybody any more."""
        self._is_kept[block_id] = False
        if self._num_holders[block_id] == 0:
            del self._kept[block_id]
            self._blank.append(block_id)

    def is_kept(self, block_id: int) -> bool:
        """Whether the block's content outlives its release."""
        return bool(self._is_kept[block_id])

    def check_integrity(self) -> None:
        """Assert that each block is held, blank or kept, and only one of them."""
        blank, kept = set(self._blank), set(self._kept)
        assert len(blank) == len(self._blank), "a block is blank twice"
        for block_id in range(self.num_blocks):
            num_holders = self._num_holders[block_id]
            assert num_holders >= 0, f"block {block_id} has {num_holders} holders"
            is_free = num_holders == 0
            assert (block_id in blank) == (is_free and not self._is_kept[block_id]), (
                f"block {block_id}: blank"
            )
            assert (block_id in kept) == (is_free and bool(self._is_kept[block_id])), (
                f"block {block_id}: kept"
            )
