"""How many blocks layers need that see a window, by arithmetic. Knows no block and no request."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WindowSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """Layers that keep the keys and values of a sequence's last positions only, in blocks of their own."""

    window: int  # positions that a query sees, itself included: the most of any of these layers
    block_size: int  # positions per block
    num_blocks: int

    def __post_init__(self) -> None:
        assert self.window >= 1 and self.block_size >= 1 and self.num_blocks >= 1

    @property
    def num_behind(self) -> int:
        """Blocks before a block whose first position still sees them."""
        return -(-(self.window - 1) // self.block_size)

    def first_block(self, position: int) -> int:
        """Number of the first block that a query at ``position``, or at a later one, sees."""
        return max(0, position - self.window + 1) // self.block_size

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at most, wherever it is, with ``num_tokens`` in steps in flight."""
        return -(-(self.window + num_tokens - 2) // self.block_size) + 1

    def holds(self, num_sequences: int, num_batched_tokens: int) -> bool:
        """Whether so many sequences of any lengths find room side by side, with two steps in flight of
        ``num_batched_tokens`` each.
        """
        return self.num_blocks >= self.wanted(num_sequences, num_batched_tokens)

    def wanted(self, num_sequences: int, num_batched_tokens: int) -> int:
        """Blocks that are enough for that."""
        in_flight = -(-2 * num_batched_tokens // self.block_size)
        return num_sequences * self.most_blocks(2) + in_flight
