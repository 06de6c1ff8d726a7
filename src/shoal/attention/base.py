"""What a paged attention kernel is given and owes. Knows no kernel and no model.

Shape letters: T tokens of the step, D sequences that bring one token (decode), L positions visible,
N blocks in the pool, S positions per block (block size), Hq query heads, H KV heads, Ek and Ev widths
of a key and a value head. Hq is a multiple of H; query head h reads KV head ``h // (Hq // H)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch

__all__ = [
    "AttentionBatch",
    "DecodeGroup",
    "KVShape",
    "LayerPages",
    "PagedKernel",
    "Prefill",
    "Variant",
    "WritesPages",
]


class KVShape(NamedTuple):
    """What one layer keeps for one position on this rank."""

    heads: int
    key_width: int
    value_width: int
    window: int | None = None  # positions that a query sees, itself included, if no other ever sees more

    def bytes_per_token(self, item_bytes: int) -> int:
        """Bytes of one position's key and value."""
        return self.heads * (self.key_width + self.value_width) * item_bytes


class Variant(NamedTuple):
    """What differs from plain attention, and the scale. Hashable, so masks can be kept by it."""

    scale: float
    window: int | None = None  # a query sees this many positions back, itself included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    is_causal: bool = True  # False: it sees as many positions ahead as it sees back


@dataclass(slots=True)
class LayerPages:
    """One layer's KV pool on this rank."""

    keys: torch.Tensor  # [N, S, H, Ek]
    values: torch.Tensor  # [N, S, H, Ev]


@dataclass(slots=True)
class DecodeGroup:
    """The sequences that bring exactly one token: tokens ``0 .. D`` of the batch."""

    block_table: torch.Tensor  # [D, blocks] int64, padded with 0
    lengths: torch.Tensor  # [D] int64: positions visible, the new token included
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # by window: [D, 1, 1, L] bool

    @property
    def size(self) -> int:
        return self.block_table.shape[0]


@dataclass(slots=True)
class Prefill:
    """One sequence that brings several tokens."""

    start: int  # its tokens are start .. stop of the batch
    stop: int
    block_ids: torch.Tensor  # [blocks] int64
    length: int  # positions visible to its last token
    masks: dict[tuple[int | None, bool], torch.Tensor | None] = field(
        default_factory=dict
    )  # by window and whether it is causal: [stop - start, length]


@dataclass(slots=True)
class AttentionBatch:
    """One step's ragged batch, the same for every layer; or for those that see no window."""

    slots: torch.Tensor  # [T] int64: where each token's key and value go, block * S + offset
    decode: DecodeGroup | None
    prefills: list[Prefill]
    windowed: AttentionBatch | None = None  # for layers that see one, if they have blocks of their own

    def of(self, window: int | None) -> AttentionBatch:
        """The batch for layers that see so many positions; None: all."""
        return self if window is None or self.windowed is None else self.windowed


class PagedKernel(Protocol):
    """Attention of a ragged batch over pages that already hold the batch's own keys and values."""

    def __call__(
        self,
        query: torch.Tensor,  # [T, Hq, Ek]
        pages: LayerPages,
        batch: AttentionBatch,
        variant: Variant,
        sinks: torch.Tensor | None,  # [Hq]: a logit per head that takes part in the softmax, or None
    ) -> torch.Tensor:  # [T, Hq, Ev]
        ...


@runtime_checkable
class WritesPages(Protocol):
    """A kernel that puts new keys and values into the pages itself: :func:`shoal.attention.pages.write`."""

    def write(
        self,
        pages: LayerPages,
        keys: torch.Tensor,  # [T, H, Ek]
        values: torch.Tensor,  # [T, H, Ev]
        slots: torch.Tensor,  # [T] int64
    ) -> None: ...
