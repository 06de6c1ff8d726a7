"""Sampling in which one row's trouble is its own. Knows no model and no step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from shoal.messages import SequenceStep, TokenResult
from shoal.sampling.sampler import sample

__all__ = ["sample_apart"]

_log = logging.getLogger("shoal.worker")


def sample_apart(logits: torch.Tensor, sequences: Sequence[SequenceStep]) -> tuple[TokenResult, ...]:
    """As :func:`shoal.sampling.sampler.sample`; if that raises, each row alone, and who raises again gets
    ``error``. Rows are independent, so the others' tokens are the same.
    """
    try:
        return sample(logits, sequences)
    except Exception:  # whatever one request asks for, the others' tokens do not depend on it
        _log.warning("sampling failed; each sequence is sampled alone", exc_info=True)
    results: list[TokenResult] = []
    for row, sequence in enumerate(sequences):
        try:
            results.extend(sample(logits[row : row + 1], [sequence]))
        except Exception as error:  # told to the request it belongs to
            told = f"sampling: {type(error).__name__}: {error}"
            results.append(TokenResult(sequence_id=sequence.sequence_id, error=told))
    return tuple(results)
