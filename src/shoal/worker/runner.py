"""Runs steps on one rank: batch, forward, sample. Knows no request beyond the step it was sent, and the ids
it sampled in the last one.
"""

from __future__ import annotations

import time

import torch

from shoal.comm.base import Comm
from shoal.messages import Step, StepResult, TokenResult
from shoal.model.base import ServedModel
from shoal.worker.inputs import build_batch
from shoal.worker.placeholders import Placeholders
from shoal.worker.sampled_apart import sample_apart

__all__ = ["Runner"]


class Runner:
    """One rank's compute.

    Args:
        model: with its pages in place.
        block_size: tokens per KV block.
        comm: of the ranks.
        samples: the rank that samples.
    """

    def __init__(
        self, model: ServedModel, block_size: int, device: torch.device, comm: Comm, samples: int
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._device = device
        self._samples = comm.rank == samples
        self._placeholders = Placeholders(comm, samples, device)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Compute a step; only the sampling rank's result has tokens."""
        started = time.perf_counter()
        awaited = self._placeholders.ids(step)
        batch, sampled = build_batch(step, self._block_size, self._device, awaited)
        if not sampled:
            # Every rank must go through the head's collectives alike; one row is the least there is.
            last = batch.rows[0].first + batch.rows[0].count - 1
            batch.wanted = torch.tensor([last], dtype=torch.int64, device=self._device)
        logits = self._model.logits(batch)
        tokens: tuple[TokenResult, ...] = ()
        if self._samples:
            tokens = sample_apart(logits, self._placeholders.in_histories(sampled)) if sampled else ()
            self._placeholders.keep(tokens)
        return StepResult(step_id=step.step_id, tokens=tokens, compute_s=time.perf_counter() - started)
