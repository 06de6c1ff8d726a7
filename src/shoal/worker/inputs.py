"""A step's integers made into a ragged batch of tensors. Knows no model and no sampling rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shoal.messages import SequenceStep, Step
from shoal.model.base import Ragged, Row

__all__ = ["build_batch"]

_Ints = npt.NDArray[np.int64]


def build_batch(step: Step, block_size: int, device: torch.device) -> tuple[Ragged, list[SequenceStep]]:
    """The batch of a step.

    Returns:
        the batch, and the sequences whose next token is sampled, in the order of its wanted rows.
    """
    ordered = sorted(step.sequences, key=_brings_many)
    tokens = [_ints(s.token_ids) for s in ordered]
    blocks = [_ints(s.block_ids) for s in ordered]
    positions = [np.arange(s.start, s.start + len(t)) for s, t in zip(ordered, tokens, strict=True)]
    slots = [b[p // block_size] * block_size + p % block_size for b, p in zip(blocks, positions, strict=True)]
    rows, wanted, sampled = _rows(ordered, tokens, blocks, device)
    batch = Ragged(
        ids=_tensor(np.concatenate(tokens), device),
        positions=_tensor(np.concatenate(positions), device),
        slots=_tensor(np.concatenate(slots), device),
        rows=rows,
        wanted=torch.tensor(wanted, dtype=torch.int64, device=device),
        block_size=block_size,
    )
    return batch, sampled


def _brings_many(sequence: SequenceStep) -> bool:
    return len(sequence.token_ids) > 4


def _rows(
    ordered: Sequence[SequenceStep], tokens: Sequence[_Ints], blocks: Sequence[_Ints], device: torch.device
) -> tuple[list[Row], list[int], list[SequenceStep]]:
    rows: list[Row] = []
    wanted: list[int] = []
    sampled: list[SequenceStep] = []
    first = 0
    for sequence, ids, block_ids in zip(ordered, tokens, blocks, strict=True):
        rows.append(Row(first, len(ids), sequence.start, _tensor(block_ids, device)))
        first += len(ids)
        if sequence.sampling is not None:
            wanted.append(first - 1)
            sampled.append(sequence)
    return rows, wanted, sampled


def _ints(data: bytes) -> _Ints:
    return np.frombuffer(data, dtype=np.int32).astype(np.int64)


def _tensor(values: _Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)
