"""Runs an encoder's steps on one rank: texts in, vectors or scores out. Knows no request, and not how its
model is served.
"""

from __future__ import annotations

import time

import torch

from shoal.errors import EngineError
from shoal.messages import Encode, StepResult, pack_ids, unpack_ids
from shoal.model.encoder import EncoderModel, Texts, pooled

__all__ = ["POOLINGS", "EncodeRunner"]

POOLINGS = ("mean", "cls", "last")


class EncodeRunner:
    """One rank's compute.

    Args:
        answers: whether this rank's results are wanted.
    """

    def __init__(self, model: EncoderModel, device: torch.device, answers: bool) -> None:
        self._model = model
        self._device = device
        self._answers = answers

    @torch.inference_mode()
    def execute(self, step: Encode) -> StepResult:
        """Compute a step; only the answering rank's result has rows."""
        started = time.perf_counter()
        type_ids = self._tensor(step.type_ids) if step.type_ids else None
        texts = Texts(self._tensor(step.token_ids), unpack_ids(step.lengths).tolist(), type_ids)
        rows, ids = self._computed(step, texts)
        if not self._answers:
            return StepResult(step_id=step.step_id, compute_s=time.perf_counter() - started)
        return StepResult(
            step_id=step.step_id,
            compute_s=time.perf_counter() - started,
            rows=rows.float().cpu().contiguous().numpy().tobytes(),
            width=rows.shape[1],
            ids=b"" if ids is None else pack_ids(ids.flatten().tolist()),
        )

    def warm_up(self) -> None:
        """Run a first, small step, of a model that makes vectors."""
        if self._model.makes_vectors:
            self.execute(
                Encode(step_id=0, token_ids=pack_ids([1, 2, 3]), lengths=pack_ids([3]), output="mean")
            )

    def _computed(self, step: Encode, texts: Texts) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What was asked for, a row each, and the words that its numbers belong to."""
        if step.output in POOLINGS:
            return pooled(self._model.hidden(texts), texts, step.output), None
        if step.output == "classes":
            return self._model.class_logits(texts), None
        if step.output == "token_classes":
            return self._model.token_logits(texts), None
        if step.output == "words":
            logits = self._model.word_logits(texts, self._tensor(step.wanted))
            top = logits.float().log_softmax(-1).topk(min(step.top_k, logits.shape[-1]))
            return top.values, top.indices
        raise EngineError(f"a rank was asked for {step.output!r}, which is nothing it computes")

    def _tensor(self, ids: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(ids), dtype=torch.int32).to(self._device, torch.int64)
