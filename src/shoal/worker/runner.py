"""Runs steps on one rank: batch, forward, sample. Knows no request beyond the step it was sent."""

from __future__ import annotations

import time

import torch

from shoal.messages import Step, StepResult
from shoal.model.base import ServedModel
from shoal.sampling.sampler import sample
from shoal.worker.inputs import build_batch

__all__ = ["Runner"]


class Runner:
    """One rank's compute.

    Args:
        model: with its pages in place.
        block_size: tokens per KV block.
        samples: whether this rank is the one that samples.
    """

    def __init__(self, model: ServedModel, block_size: int, device: torch.device, samples: bool) -> None:
        self._model = model
        self._block_size = block_size
        self._device = device
        self._samples = samples

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Compute a step; only the sampling rank's result has tokens."""
        started = time.perf_counter()
        batch, sampled = build_batch(step, self._block_size, self._device)
        if not sampled:
            # Every rank must go through the head's collectives alike; one row is the least there is.
            last = batch.rows[0].first + batch.rows[0].count - 1
            batch.wanted = torch.tensor([last], dtype=torch.int64, device=self._device)
        logits = self._model.logits(batch)
        tokens = sample(logits, sampled) if self._samples and sampled else ()
        return StepResult(step_id=step.step_id, tokens=tuple(tokens), compute_s=time.perf_counter() - started)
