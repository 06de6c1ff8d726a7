"""A step's integers made into a ragged batch of tensors. Knows no model and no sampling rule.

All sequences together are a few arrays, each made by one numpy call: what is done sequence by sequence in
Python is no more than reading the step's fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from shoal.attention.base import AttentionBatch, DecodeGroup, Prefill
from shoal.messages import PLACEHOLDER_ID, SequenceStep, Step
from shoal.model.base import Ragged, Row, Source

__all__ = ["build_batch"]

_Ints = npt.NDArray[np.int64]
_ID_BYTES = np.dtype(np.int32).itemsize


def build_batch(
    step: Step, block_size: int, device: torch.device, awaited: Sequence[int] = ()
) -> tuple[Ragged, list[SequenceStep]]:
    """The batch of a step.

    Args:
        awaited: what the step's placeholders stand for, sequence by sequence.

    Returns:
        the batch, laid out for paged attention, and the sequences whose next token is sampled, in the order
        of its wanted rows.
    """
    ordered = sorted(step.sequences, key=_brings_many)
    ids = _ints([s.token_ids for s in ordered])
    if awaited:
        ids[ids == PLACEHOLDER_ID] = awaited  # sequences with one token keep their order
    starts = np.array([s.start for s in ordered], dtype=np.int64)
    counts = _counts([s.token_ids for s in ordered])
    firsts = counts.cumsum() - counts
    positions = np.arange(len(ids)) + np.repeat(starts - firsts, counts)
    state_slots = [s.slot for s in ordered]

    def laid_out(tables: Sequence[bytes]) -> tuple[_Rows, AttentionBatch]:
        """The rows over these blocks."""
        blocks, block_counts = _ints(tables), _counts(tables)
        first_blocks = block_counts.cumsum() - block_counts
        slots = _slots(positions, np.repeat(first_blocks, counts), blocks, block_size)
        rows = _Rows(
            _tensor(blocks, device),
            firsts.tolist(),
            counts.tolist(),
            starts.tolist(),
            first_blocks.tolist(),
            block_counts.tolist(),
            state_slots,
        )
        num_single = int(np.count_nonzero(counts == 1))
        decode = _decode_group(blocks, block_counts[:num_single], starts[:num_single] + 1, device)
        prefills = [Prefill(r.first, r.first + r.count, r.block_ids, r.length) for r in rows[num_single:]]
        return rows, AttentionBatch(_tensor(slots, device), decode, prefills)

    rows, attention = laid_out([s.block_ids for s in ordered])
    if ordered[0].window_block_ids:
        attention.windowed = laid_out([_whole_table(s) for s in ordered])[1]
    is_sampled = np.array([s.sampling is not None for s in ordered], dtype=bool)
    batch = Ragged(
        ids=_tensor(ids, device),
        positions=_tensor(positions, device),
        slots=attention.slots,
        rows=rows,
        wanted=_tensor((firsts + counts - 1)[is_sampled], device),
        block_size=block_size,
        attention=attention,
        sources=[_source(s, device) for s in ordered if s.num_encoder],
    )
    return batch, [s for s in ordered if s.sampling is not None]


def _whole_table(sequence: SequenceStep) -> bytes:
    """The blocks of layers that see a window, from position 0 on.

    Kernels may read a little in front of the window, to no effect. In place of a block that is gone stands
    the sequence's own first one: what belongs to others is not for it to read.
    """
    blocks = sequence.window_block_ids
    return blocks[:_ID_BYTES] * sequence.window_base + blocks


def _source(sequence: SequenceStep, device: torch.device) -> Source:
    ids = _tensor(_ints([sequence.encoder_ids]), device) if sequence.encoder_ids else None
    return Source(sequence.num_encoder, _tensor(_ints([sequence.cross_block_ids]), device), ids)


def _brings_many(sequence: SequenceStep) -> bool:
    return len(sequence.token_ids) > _ID_BYTES


def _slots(positions: _Ints, first_blocks: _Ints, blocks: _Ints, block_size: int) -> _Ints:
    """Where each token goes; ``first_blocks`` says where its sequence's blocks begin."""
    index, offset = np.divmod(positions, block_size)
    index += first_blocks
    slots: _Ints = blocks[index] * block_size + offset
    return slots


def _decode_group(
    blocks: _Ints, block_counts: _Ints, lengths: _Ints, device: torch.device
) -> DecodeGroup | None:
    """The sequences with one token, whose blocks come first."""
    if not len(block_counts):
        return None
    table = np.zeros((len(block_counts), block_counts.max()), dtype=np.int64)
    is_block = np.arange(table.shape[1]) < block_counts[:, None]
    table[is_block] = blocks[: block_counts.sum()]
    return DecodeGroup(_tensor(table, device), _tensor(lengths, device))


@dataclass(frozen=True, slots=True)
class _Rows(Sequence[Row]):
    """Rows made when they are asked for: paged attention asks for none of those with one token."""

    block_ids: torch.Tensor  # [all blocks] int64, sequence after sequence
    firsts: list[int]
    counts: list[int]
    starts: list[int]
    first_blocks: list[int]
    block_counts: list[int]
    state_slots: list[int]

    def __len__(self) -> int:
        return len(self.firsts)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        first = self.first_blocks[index]
        block_ids = self.block_ids[first : first + self.block_counts[index]]
        slot = self.state_slots[index]
        return Row(self.firsts[index], self.counts[index], self.starts[index], block_ids, slot)


def _ints(parts: Sequence[bytes]) -> _Ints:
    return np.frombuffer(b"".join(parts), dtype=np.int32).astype(np.int64)


def _counts(parts: Sequence[bytes]) -> _Ints:
    return np.array([len(part) for part in parts], dtype=np.int64) // _ID_BYTES


def _tensor(values: _Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)
