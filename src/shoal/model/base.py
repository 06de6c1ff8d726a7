"""What the worker feeds a model and what it gets back. Knows no family and no kernel.

Shape letters: T tokens of the step, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from shoal.attention.base import AttentionBatch, KVShape, LayerPages

__all__ = ["Careful", "KeepsState", "Ragged", "Row", "ServedModel", "Source"]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's tokens in a ragged batch."""

    first: int  # its tokens are first .. first + count
    count: int
    start: int  # position of its first token: so many positions are in its pages already
    block_ids: torch.Tensor  # [blocks] int64, enough for start + count positions
    slot: int = -1  # of its state, for models that keep one

    @property
    def length(self) -> int:
        """Positions visible to its last token."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Source:
    """The encoder's side of one row of an encoder-decoder's batch."""

    length: int  # tokens of the encoder's input
    block_ids: torch.Tensor  # [blocks] int64: where its cross-attention K and V are kept
    ids: torch.Tensor | None = None  # [length] int64: to be encoded in this step; None: that was done before


@dataclass(slots=True)
class Ragged:
    """One step's tokens, sequence after sequence; those that bring a single token come first."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64: block * block_size + offset
    rows: Sequence[Row]
    wanted: torch.Tensor  # [R] int64: tokens whose logits are wanted
    block_size: int
    attention: AttentionBatch | None = None  # the same rows for a paged kernel; None: not laid out yet
    sources: Sequence[Source] = ()  # one a row, of an encoder-decoder


class ServedModel(Protocol):
    """A model that computes ragged batches over KV pages."""

    @property
    def way(self) -> str:
        """How it is served: ``paged``, ``padded``, ``state``, ``recompute``."""
        ...

    @property
    def keeps_kv(self) -> bool:
        """False: nothing is kept of a sequence, and every row brings all its tokens."""
        ...

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """What each layer keeps per position on this rank."""
        ...

    def use_pages(self, pages: list[LayerPages]) -> None:
        """Keep K and V there from now on."""
        ...

    def plain(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of one sequence ids [T] at tokens ``wanted`` [R], without pages."""
        ...

    def logits(self, batch: Ragged) -> torch.Tensor:
        """Logits [R, V] of a batch; its keys and values are in the pages afterwards."""
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A served model that keeps a state for each sequence: read and written in the slot of its row, begun
    anew by rows that start at position 0.
    """

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state on this rank."""
        ...

    def use_slots(self, num_slots: int) -> None:
        """Keep so many states from now on."""
        ...


@runtime_checkable
class Careful(Protocol):
    """A served model that tries what is fast first."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was settled for, and what it costs."""
        ...

    def be_more_careful(self) -> bool:
        """Compute in a slower way from now on; False: there is none."""
        ...
