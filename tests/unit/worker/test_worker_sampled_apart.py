"""A row that cannot be sampled is one request's error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import shoal.worker.sampled_apart as module
from shoal.messages import SamplingSpec, SequenceStep, TokenResult, pack_ids
from shoal.sampling.sampler import sample
from shoal.worker.sampled_apart import sample_apart


def sequence(number: int, seed: int = 3) -> SequenceStep:
    return SequenceStep(
        sequence_id=number,
        start=0,
        token_ids=pack_ids([5]),
        block_ids=pack_ids([0]),
        sampling=SamplingSpec(temperature=0.9, seed=seed),
    )


LOGITS = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
SEQUENCES = [sequence(number) for number in range(4)]


def test_the_row_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(logits: torch.Tensor, sequences: Sequence[SequenceStep]) -> tuple[TokenResult, ...]:
        if any(s.sequence_id == 2 for s in sequences):
            raise OverflowError("no such seed")
        return sample(logits, sequences)

    monkeypatch.setattr(module, "sample", raising)
    results = sample_apart(LOGITS, SEQUENCES)
    assert results[2] == TokenResult(sequence_id=2, error="sampling: OverflowError: no such seed")
    wanted = sample(LOGITS, SEQUENCES)
    assert [results[i] for i in (0, 1, 3)] == [wanted[i] for i in (0, 1, 3)]


def test_where_nothing_raises_it_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counting(logits: torch.Tensor, sequences: Sequence[SequenceStep]) -> tuple[TokenResult, ...]:
        calls.append(len(sequences))
        return sample(logits, sequences)

    monkeypatch.setattr(module, "sample", counting)
    assert len(sample_apart(LOGITS, SEQUENCES)) == 4 and calls == [4]
