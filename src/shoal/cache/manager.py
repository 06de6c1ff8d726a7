"""Which blocks each sequence holds: lookup, admit, grow, commit, fork, free.

Knows no request, no step and no tensor: a sequence is its token ids, and KV is block ids.

A sequence's blocks, with what is valid where::

    | registered: full, computed, found by others | computed, not full | allocated |
    0                         len(nodes) * block_size         num_computed         len(block_ids) * block_size

When a block turns out to hold what a registered block holds already, the sequence changes over to that
one and gives its own back. So whoever holds a registered block also holds its registered parent, and
since :meth:`BlockPool.release` frees tails first, a parent is never taken before its child.

Layers that see a window have blocks of their own (:mod:`.window`), of which a sequence keeps those that its
next position still sees::

    | given back                                  | held                                |
    0                    window_base * block_size    num_computed         as many as block_ids, or fewer

They are given back once the step is answered that computed what no longer sees them: whatever is in flight
then began behind it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.cache.pool import BlockPool
from shoal.cache.prefix import Digest, PrefixIndex, PrefixNode, block_digest
from shoal.cache.spec import WindowSpec
from shoal.cache.window import WindowPool

__all__ = ["CacheManager", "Prefix", "SequenceBlocks"]


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """What the cache knows of one sequence. Only :class:`CacheManager` changes it."""

    token_ids: array[int]  # the owner's own array, prompt then output; it grows by appending
    salt: bytes = b""
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    nodes: list[PrefixNode] = field(default_factory=list)  # of the leading registered blocks
    digests: list[bytes] = field(default_factory=list)  # of leading full blocks, as far as asked for
    slot: int = -1  # of its state, while it holds blocks of a manager that has slots
    num_encoder: int = 0  # tokens of an encoder's input, whose cross-attention K and V it keeps as well
    cross_ids: array[int] = field(default_factory=lambda: array("i"))  # blocks of these
    window_base: int = 0  # so many leading blocks were given back by layers that see a window
    window_ids: array[int] = field(default_factory=lambda: array("i"))  # their blocks from there on


@dataclass(slots=True, frozen=True)
class Prefix:
    """Leading blocks whose KV is there. Valid until the manager's next change."""

    block_ids: array[int]
    nodes: list[PrefixNode]
    num_tokens: int
    window_base: int = 0
    window_ids: array[int] = field(default_factory=lambda: array("i"))  # what the next position sees of it


class CacheManager:
    """The blocks of one engine.

    Args:
        num_blocks: blocks every rank keeps.
        block_size: tokens per block.
        enable_prefix_caching: reuse the KV of equal prefixes across sequences and over time.
        digest: how a block's digest is made.
        num_slots: sequences whose state is kept, for models that keep one whatever a sequence's length; each
            holder gets one. None: there are no states. What is computed then cannot be shared: a block says
            nothing of the state behind it.
        window: of layers that see one, which then have blocks of their own; None: there are none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        digest: Digest = block_digest,
        num_slots: int | None = None,
        window: WindowSpec | None = None,
    ) -> None:
        assert block_size >= 1, f"a block holds at least one token, got {block_size}"
        assert window is None or window.block_size == block_size
        assert num_slots is None or (num_slots >= 1 and not enable_prefix_caching)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._digest = digest
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex()
        self._holders: set[SequenceBlocks] = set()
        self._window = None if window is None else WindowPool(window)
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots or 0))

    @property
    def num_free(self) -> int:
        """Blocks no sequence holds; those kept for reuse count as free."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of blocks that sequences hold, 0 to 1."""
        return self._pool.usage

    @property
    def window(self) -> WindowSpec | None:
        """Of layers that see one."""
        return None if self._window is None else self._window.spec

    @property
    def window_usage(self) -> float:
        """As :attr:`usage`, of the blocks of layers that see a window; 0 where there are none."""
        return 0.0 if self._window is None else self._window.usage

    @property
    def has_slots(self) -> bool:
        """Whether sequences keep a state beside their blocks."""
        return self._num_slots is not None

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that hold ``num_positions`` positions."""
        return -(-num_positions // self.block_size)

    def lookup(self, sequence: SequenceBlocks) -> Prefix:
        """The longest cached prefix of a sequence's tokens.

        Whole blocks only, and never all tokens: at least one is left, whose logits are wanted. Where layers
        see a window, one that they can go on from.
        """
        nodes: list[PrefixNode] = []
        if self.enable_prefix_caching:
            parent: PrefixNode | None = None
            for index in range((len(sequence.token_ids) - 1) // self.block_size):
                tokens = self._tokens_of(sequence, index)
                parent = self._index.find(
                    self._digest_of(sequence, index, tokens), parent, tokens, sequence.salt
                )
                if parent is None:
                    break
                nodes.append(parent)
        window, base, window_ids = self._window, 0, array("i")
        if window is not None:
            del nodes[window.num_usable(nodes) :]
            base = window.spec.first_block(len(nodes) * self.block_size)
            window_ids = window.blocks_of(nodes[base:])
        block_ids = array("i", [node.block_id for node in nodes])
        return Prefix(block_ids, nodes, len(nodes) * self.block_size, base, window_ids)

    def fork(self, parent: SequenceBlocks, num_tokens: int) -> Prefix | None:
        """The blocks of another sequence's first ``num_tokens`` tokens, for one that begins alike; None if
        it has given back some that are needed to go on from there.

        ``num_tokens`` fills whole blocks, and ``parent`` has computed them: nobody writes them again.
        """
        count, rest = divmod(num_tokens, self.block_size)
        assert rest == 0 and count <= len(parent.block_ids), f"{num_tokens} tokens are not whole blocks held"
        base, window_ids = 0, array("i")
        if self._window is not None:
            base = self._window.spec.first_block(num_tokens)
            if base < parent.window_base:
                return None
            window_ids = parent.window_ids[base - parent.window_base : count - parent.window_base]
        return Prefix(parent.block_ids[:count], parent.nodes[:count], num_tokens, base, window_ids)

    def admit(
        self,
        sequence: SequenceBlocks,
        prefix: Prefix,
        num_positions: int,
        sibling: SequenceBlocks | None = None,
        num_first: int | None = None,
    ) -> bool:
        """Give a sequence that holds nothing ``prefix`` and new blocks up to ``num_positions``.

        Args:
            num_first: of these, positions that its first step reaches; None: all. Layers that see a window
                get no blocks beyond them.
            sibling: holds the cross-attention of the same encoder input, computed; None: nobody does.

        Returns:
            whether there were enough free blocks, and a slot; if not, nothing has changed.
        """
        assert not sequence.block_ids, "the sequence was admitted before"
        pool = self._pool
        if self.has_slots and not self._free_slots:
            return False
        num_new = self.blocks_for(num_positions) - len(prefix.block_ids)
        num_crossed = 0 if sibling is not None else self.blocks_for(sequence.num_encoder)
        num_woken = sum(pool.num_holders(block_id) == 0 for block_id in prefix.block_ids)
        if num_new + num_crossed > pool.num_free - num_woken:
            return False
        window, num_windowed = self._window, 0
        if window is not None:
            num_windowed = self.blocks_for(num_positions if num_first is None else num_first)
            num_windowed -= len(prefix.block_ids)
            if not window.has_room(prefix.window_ids, num_windowed):
                return False
        if self.has_slots:
            sequence.slot = self._free_slots.pop()
        pool.share(prefix.block_ids)
        sequence.block_ids.extend(prefix.block_ids)
        sequence.nodes.extend(prefix.nodes)
        sequence.digests.extend(node.digest for node in prefix.nodes[len(sequence.digests) :])
        self._holders.add(sequence)
        if sibling is not None:
            pool.share(sibling.cross_ids)
            sequence.cross_ids.extend(sibling.cross_ids)
        self._append(sequence.cross_ids, num_crossed)
        self._append(sequence.block_ids, num_new)
        if window is not None:
            sequence.window_base = prefix.window_base
            window.share(prefix.window_ids)
            sequence.window_ids.extend(prefix.window_ids)
            sequence.window_ids.extend(window.take(num_windowed))
        return True

    def grow(self, sequence: SequenceBlocks, num_positions: int) -> bool:
        """Give a sequence new blocks up to ``num_positions``.

        Returns:
            whether there were enough free blocks; if not, nothing has changed.
        """
        held, window = len(sequence.block_ids), self._window
        if window is None and num_positions <= held * self.block_size:
            return True
        num_wanted = self.blocks_for(num_positions)
        num_new = max(0, num_wanted - held)
        if num_new > self._pool.num_free:
            return False
        if window is not None:
            num_windowed = max(0, num_wanted - sequence.window_base - len(sequence.window_ids))
            if num_windowed > window.num_free:
                return False
            sequence.window_ids.extend(window.take(num_windowed))
        self._append(sequence.block_ids, num_new)
        return True

    def commit(self, sequence: SequenceBlocks, num_computed: int) -> None:
        """Register the full blocks among the first ``num_computed`` positions, and give back what layers
        that see a window do not see from there on.

        Call it once the step that computed them was answered: from here on others may read them.
        """
        num_full = num_computed // self.block_size
        if len(sequence.nodes) < num_full and self.enable_prefix_caching:
            self._register(sequence, num_full)
        if self._window is not None:
            self._slide(self._window, sequence, num_computed)

    def _register(self, sequence: SequenceBlocks, num_full: int) -> None:
        nodes = sequence.nodes
        for index in range(len(nodes), num_full):
            tokens = self._tokens_of(sequence, index)
            digest = self._digest_of(sequence, index, tokens)
            block_id = sequence.block_ids[index]
            parent = nodes[-1] if nodes else None
            node = self._index.register(block_id, digest, parent, tokens, sequence.salt)
            if node is None:  # a collision; what follows would hang on other content's node
                return
            if node.block_id == block_id:
                self._pool.keep(block_id)
            else:
                self._pool.share((node.block_id,))
                self._pool.release((block_id,))
                sequence.block_ids[index] = node.block_id
            nodes.append(node)
            place = index - sequence.window_base
            if self._window is not None and place >= 0:
                sequence.window_ids[place] = self._window.register(node, sequence.window_ids[place])

    def _slide(self, window: WindowPool, sequence: SequenceBlocks, num_computed: int) -> None:
        if not self.enable_prefix_caching:
            # Nobody finds again what is given back, and who begins alike goes on from whole blocks.
            num_computed = (num_computed - 1) // self.block_size * self.block_size
        first = window.spec.first_block(num_computed)
        num_left = first - sequence.window_base
        if num_left > 0:
            window.release(sequence.window_ids[:num_left])
            del sequence.window_ids[:num_left]
            sequence.window_base = first

    def free(self, sequence: SequenceBlocks) -> None:
        """Take all blocks from a sequence. Registered ones stay usable until they are needed."""
        self._pool.release(sequence.block_ids)
        self._pool.release(sequence.cross_ids)
        if self._window is not None:
            self._window.release(sequence.window_ids)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
        self._clear(sequence)
        self._holders.discard(sequence)

    def reset(self) -> None:
        """Take everything from everybody and forget every prefix: the pages are gone."""
        for sequence in self._holders:
            self._clear(sequence)
        self._holders.clear()
        self._index.clear()
        self._pool.reset()
        if self._window is not None:
            self._window.reset()
        self._free_slots = list(range(self._num_slots or 0))

    def check_integrity(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Assert that ``sequences`` are exactly the holders and that all counts agree."""
        assert self._holders == set(sequences), "the holders are not who they should be"
        counts = [0] * self.num_blocks
        for sequence in self._holders:
            for block_id in (*sequence.block_ids, *sequence.cross_ids):
                counts[block_id] += 1
            assert len(sequence.nodes) <= len(sequence.block_ids)
            parent = None
            for index, node in enumerate(sequence.nodes):
                assert node.block_id == sequence.block_ids[index] and self._index.contains(node)
                assert node.holds(parent, self._tokens_of(sequence, index), sequence.salt)
                parent = node
        for block_id, count in enumerate(counts):
            assert count == self._pool.num_holders(block_id), f"block {block_id} has {count} holders"
        slots = [*self._free_slots, *(sequence.slot for sequence in self._holders if self.has_slots)]
        assert sorted(slots) == list(range(self._num_slots or 0)), "a slot is lost, or held twice"
        kept = {block_id for block_id in range(self.num_blocks) if self._pool.is_kept(block_id)}
        assert kept == self._index.block_ids(), "kept blocks and registered blocks differ"
        self._pool.check_integrity()
        self._index.check_integrity()
        self._check_windows()

    def _check_windows(self) -> None:
        for sequence in self._holders:
            assert sequence.window_base + len(sequence.window_ids) <= len(sequence.block_ids)
        if self._window is None:
            assert not any(sequence.window_ids for sequence in self._holders)
        else:
            self._window.check_integrity([sequence.window_ids for sequence in self._holders], self._index)

    def _append(self, held: array[int], num_new: int) -> None:
        block_ids = self._pool.take(num_new)
        for block_id in block_ids:
            node = self._index.forget(block_id)
            if node is not None and self._window is not None:
                self._window.forget(node)
        held.extend(block_ids)

    def _clear(self, sequence: SequenceBlocks) -> None:
        del sequence.block_ids[:]
        del sequence.cross_ids[:]
        del sequence.window_ids[:]
        sequence.window_base = 0
        sequence.nodes.clear()
        sequence.slot = -1

    def _tokens_of(self, sequence: SequenceBlocks, index: int) -> bytes:
        start = index * self.block_size
        return sequence.token_ids[start : start + self.block_size].tobytes()

    def _digest_of(self, sequence: SequenceBlocks, index: int, tokens: bytes) -> bytes:
        """Block ``index``'s digest; the digests before it have been asked for already."""
        digests = sequence.digests
        if index == len(digests):
            digests.append(self._digest(digests[-1] if digests else sequence.salt, tokens))
        return digests[index]
