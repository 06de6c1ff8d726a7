"""The blocks of layers that see a window: which are free, and of which prefixes they are. Knows no sequence.

A registered block of the other layers (a :class:`PrefixNode`) may have its counterpart here. It is found by
its node; it may be gone, taken for something else, while the node is still there. A counterpart is held only
by sequences that hold the node's block too, so it never outlives its node in anybody's hands.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shoal.cache.pool import BlockPool
from shoal.cache.prefix import PrefixIndex, PrefixNode
from shoal.cache.spec import WindowSpec

__all__ = ["WindowPool"]


class WindowPool:
    """``spec.num_blocks`` ids of their own, 0 to ``spec.num_blocks - 1``."""

    def __init__(self, spec: WindowSpec) -> None:
        self.spec = spec
        self._pool = BlockPool(spec.num_blocks)
        self._block_of: dict[PrefixNode, int] = {}
        self._node_of: dict[int, PrefixNode] = {}

    @property
    def num_free(self) -> int:
        """Blocks no sequence holds; those kept for reuse count as free."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of blocks that sequences hold, 0 to 1."""
        return self._pool.usage

    def num_usable(self, nodes: Sequence[PrefixNode]) -> int:
        """How many leading blocks of a prefix one can go on from: what the next position sees is here."""
        end = index = len(nodes)
        while index > max(0, end - self.spec.num_behind):
            index -= 1
            if nodes[index] not in self._block_of:
                end = index
        return end

    def blocks_of(self, nodes: Sequence[PrefixNode]) -> array[int]:
        """The counterparts of nodes that all have one."""
        return array("i", [self._block_of[node] for node in nodes])

    def has_room(self, shared: Sequence[int], num_new: int) -> bool:
        """Whether there are free blocks for ``num_new``, beside blocks that are to be shared."""
        num_woken = sum(self._pool.num_holders(block_id) == 0 for block_id in shared)
        return num_new <= self._pool.num_free - num_woken

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold blocks once more."""
        self._pool.share(block_ids)

    def take(self, count: int) -> list[int]:
        """``count`` free blocks, held once each."""
        block_ids = self._pool.take(count)
        for block_id in block_ids:
            node = self._node_of.pop(block_id, None)
            if node is not None:
                del self._block_of[node]
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Hold blocks once less."""
        self._pool.release(block_ids)

    def register(self, node: PrefixNode, block_id: int) -> int:
        """Say that a held block is a node's counterpart.

        Returns:
            the block to hold from now on: another, in its place, if the node had one before.
        """
        known = self._block_of.setdefault(node, block_id)
        if known == block_id:
            self._node_of[block_id] = node
            self._pool.keep(block_id)
        else:
            self._pool.share((known,))
            self._pool.release((block_id,))
        return known

    def forget(self, node: PrefixNode) -> None:
        """The node is registered no more: nobody will ask for its counterpart."""
        block_id = self._block_of.pop(node, None)
        if block_id is not None:
            del self._node_of[block_id]
            self._pool.discard(block_id)

    def reset(self) -> None:
        """All blocks free, and nobody's."""
        self._pool.reset()
        self._block_of.clear()
        self._node_of.clear()

    def check_integrity(self, held: Sequence[Sequence[int]], index: PrefixIndex) -> None:
        """Assert that ``held``, sequence by sequence, is what is held, and that only registered nodes have
        counterparts.
        """
        counts = [0] * self.spec.num_blocks
        for block_ids in held:
            for block_id in block_ids:
                counts[block_id] += 1
        for block_id, count in enumerate(counts):
            assert count == self._pool.num_holders(block_id), f"window block {block_id} has {count} holders"
        kept = {block_id for block_id in range(self.spec.num_blocks) if self._pool.is_kept(block_id)}
        assert kept == self._node_of.keys(), "kept blocks and those of nodes differ"
        assert self._block_of == {node: block_id for block_id, node in self._node_of.items()}
        assert all(index.contains(node) for node in self._block_of), "a counterpart outlived its node"
        self._pool.check_integrity()
