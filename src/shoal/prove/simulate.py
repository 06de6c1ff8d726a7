"""Runs a plan for real on a small model: simulated ranks, production layers, against the unsharded
model. Knows no planning.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import PlanError
from shoal.plan.drive import Batch, batch_of, decode_pass, prefill_pass
from shoal.plan.random import own_random
from shoal.plan.skeleton import build_with_generator, embedding_size
from shoal.plan.types import Plan
from shoal.shard import shard

__all__ = [
    "FLOAT32_TOLERANCE",
    "FLOAT64_TOLERANCE",
    "Run",
    "Subject",
    "compare",
    "random_subject",
    "run_plan",
]

FLOAT64_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 2e-4
_TOKENS = 9
_TIMEOUT_S = 120.0
_log = logging.getLogger("shoal.prove")


@dataclass(frozen=True, slots=True)
class Run:
    """A model with random weights, what it is fed, and what it gives, unsharded."""

    model: nn.Module
    batches: Sequence[Batch]
    expected: list[torch.Tensor]  # outputs of all passes of all batches
    has_decode: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """What a plan is proved on: the same model with eager attention and, where it has that, with SDPA.

    Both, because code may come out right under one only: eager products broadcast where SDPA does not.
    """

    runs: tuple[Run, ...]
    tolerance: float  # relative
    attention: tuple[str, ...]

    @property
    def has_decode(self) -> bool:
        """Whether a cache was kept and gone on from."""
        return self.runs[0].has_decode


def random_subject(model_class: type[nn.Module], config: Any) -> Subject:
    """Build the model in float64, or in float32 where its code cannot compute in float64.

    Raises:
        PlanError: it cannot be run at all, or gives no finite numbers.
    """
    vocabulary = embedding_size(config)
    plain = [batch_of(vocabulary, rows, _TOKENS, seed=rows) for rows in (1, 2)]
    padded = batch_of(vocabulary, 2, _TOKENS, padding=3, seed=4)
    failure = ""
    for dtype, tolerance in ((torch.float64, FLOAT64_TOLERANCE), (torch.float32, FLOAT32_TOLERANCE)):
        try:
            eager = _reference(model_class, config, dtype, "eager", [*plain, padded])
        except Exception as error:  # a model's own code fails in any way, float64 being unusual
            failure = f"{type(error).__name__}: {error}"
            continue
        try:
            sdpa = _reference(model_class, config, dtype, "sdpa", [padded])
        except Exception as error:  # not every model has it
            _log.debug("%s is proved with eager attention only: %s", model_class.__name__, error)
            return Subject((eager,), tolerance, ("eager",))
        return Subject((eager, sdpa), tolerance, ("eager", "sdpa"))
    raise PlanError(f"{model_class.__name__} cannot be run to prove a plan: {failure}")


def _reference(
    model_class: type[nn.Module], config: Any, dtype: torch.dtype, attention: str, batches: Sequence[Batch]
) -> Run:
    """The unsharded model's outputs."""
    model = random_model(model_class, config, dtype, attention)
    expected, has_decode = _run(model, batches)
    finite = [torch.isfinite(tensor) for tensor in expected]
    # In float32, the last resort, a model may mean its infinities; in float64 they would hide what they meet.
    is_usable = all(bool(entry.all() if dtype is torch.float64 else entry.any()) for entry in finite)
    if not is_usable:
        raise PlanError("its outputs are not finite")
    return Run(model, batches, expected, has_decode)


def random_model(
    model_class: type[nn.Module], config: Any, dtype: torch.dtype, attention: str = "eager"
) -> nn.Module:
    """The model with random values in everything, so that no wrong slice can hide in zeros or ones."""
    generator = torch.Generator().manual_seed(11)
    model = build_with_generator(model_class, config, generator, attention).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            is_gain = parameter.dim() == 1 and bool((parameter == 1).all())
            spread = 0.2 if parameter.dim() <= 1 else min(0.3, 1.2 / parameter.shape[-1] ** 0.5)
            noise = torch.empty(parameter.shape, dtype=dtype).normal_(generator=generator)
            parameter.copy_(noise * spread + (1.0 if is_gain else 0.0))
    return model.requires_grad_(False)


def run_plan(plan: Plan, subject: Subject, prepare: Callable[[nn.Module], None] | None = None) -> float:
    """Run the subject sharded by ``plan`` on simulated ranks.

    Args:
        plan: with the subject's own widths.
        subject: the model and what it gives unsharded.
        prepare: called with each rank's sharded model before it runs (a test breaks something here).

    Returns:
        the largest relative error of any output on any rank.

    Raises:
        PlanError: the sharded model cannot be run, or ranks or shapes differ.
    """

    def rank_body(comm: SimulatedComm) -> float:
        worst = 0.0
        for run in subject.runs:
            model = copy.deepcopy(run.model)
            shard(model, plan, comm.rank, comm)
            if prepare is not None:
                prepare(model)
            worst = max(worst, compare(_run(model, run.batches)[0], run.expected))
        return worst

    try:
        return max(run_ranks(plan.tp, rank_body, _TIMEOUT_S))
    except PlanError:
        raise
    except Exception as error:  # whatever the model's own code raises on a wrong split
        raise PlanError(f"the sharded model fails: {type(error).__name__}: {error}") from error


def compare(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the spread of the expected values; infinite if shapes differ."""
    if len(got) != len(expected) or any(a.shape != b.shape for a, b in zip(got, expected, strict=True)):
        return float("inf")
    worst = 0.0
    for ours, theirs in zip(got, expected, strict=True):
        if not torch.equal(torch.isfinite(ours), torch.isfinite(theirs)):
            return float("inf")
        finite = torch.isfinite(theirs)
        if bool(finite.any()):
            scale = float(theirs[finite].abs().amax().clamp(min=1e-30))
            worst = max(worst, float((ours[finite] - theirs[finite]).abs().amax()) / scale)
    return worst


@torch.no_grad()
def _run(model: nn.Module, batches: Sequence[Batch]) -> tuple[list[torch.Tensor], bool]:
    """All outputs of prefill and, where there is a cache, of a decode step, for every batch."""
    outputs: list[torch.Tensor] = []
    has_decode = False
    with own_random():
        for batch in batches:
            prefill = prefill_pass(model, batch)
            outputs += prefill.outputs
            if prefill.cache is not None:
                has_decode = True
                outputs += decode_pass(model, batch, prefill).outputs
    return outputs, has_decode
