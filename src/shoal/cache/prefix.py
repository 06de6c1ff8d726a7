"""Which full blocks hold which token prefix. Knows no reference count and no request.

A block's digest chains its parent's digest and its own token ids, so it stands for everything up to
the block's end, and is the same in every process and Python version (never ``hash()``). The digest only
finds a candidate; a hit also needs equal tokens, an equal salt and the very parent that was matched
before, so that a collision costs a miss and never gives the wrong keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

__all__ = ["Digest", "PrefixIndex", "PrefixNode", "block_digest"]

Digest = Callable[[bytes, bytes], bytes]
"""From the parent's digest (the salt for a first block) and packed token ids to a block's digest."""


def block_digest(parent_digest: bytes, tokens: bytes) -> bytes:
    """16 bytes of BLAKE2b over the parent's digest and a block's packed int32 token ids."""
    return blake2b(parent_digest + tokens, digest_size=16, person=b"shoal prefix").digest()


@dataclass(slots=True, eq=False, frozen=True)
class PrefixNode:
    """One registered block: its content's identity is ``parent``, ``salt`` and ``tokens``."""

    block_id: int
    digest: bytes
    parent: PrefixNode | None  # None: the block starts at position 0
    tokens: bytes  # int32, block_size of them
    salt: bytes  # requests share blocks only under the same salt

    def holds(self, parent: PrefixNode | None, tokens: bytes, salt: bytes) -> bool:
        """Whether this is the block of ``tokens`` after ``parent``; exact, whatever the digests say."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


class PrefixIndex:
    """Registered blocks by digest and by block id.

    A node's parent is registered as long as the node is: the caller forgets children first.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, PrefixNode] = {}
        self._by_block: dict[int, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, digest: bytes, parent: PrefixNode | None, tokens: bytes, salt: bytes) -> PrefixNode | None:
        """The node that holds exactly this content, if there is one."""
        node = self._by_digest.get(digest)
        return node if node is not None and node.holds(parent, tokens, salt) else None

    def register(
        self, block_id: int, digest: bytes, parent: PrefixNode | None, tokens: bytes, salt: bytes
    ) -> PrefixNode | None:
        """Say that a block holds this content.

        Returns:
            the node of this content, which names another block if the content was there before;
            None if other content with the same digest is registered, and this cannot be.
        """
        node = self._by_digest.get(digest)
        if node is not None:
            return node if node.holds(parent, tokens, salt) else None
        assert block_id not in self._by_block, f"block {block_id} holds other content already"
        node = PrefixNode(block_id, digest, parent, tokens, salt)
        self._by_digest[digest] = self._by_block[block_id] = node
        return node

    def forget(self, block_id: int) -> PrefixNode | None:
        """The block is about to hold something else; what it was, None if it was not registered."""
        node = self._by_block.pop(block_id, None)
        if node is not None:
            del self._by_digest[node.digest]
        return node

    def clear(self) -> None:
        """Forget everything."""
        self._by_digest.clear()
        self._by_block.clear()

    def block_ids(self) -> set[int]:
        """The registered blocks."""
        return set(self._by_block)

    def contains(self, node: PrefixNode) -> bool:
        """Whether this very node is registered."""
        return self._by_digest.get(node.digest) is node

    def check_integrity(self) -> None:
        """Assert that both tables hold the same nodes, and each node's parent too."""
        assert len(self._by_digest) == len(self._by_block)
        for block_id, node in self._by_block.items():
            assert node.block_id == block_id and self.contains(node)
            assert node.parent is None or self.contains(node.parent), f"block {block_id} outlived its parent"
