"""Runs a plan for real on a small model: simulated ranks, production layers, against the unsharded
model. Knows no planning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import PlanError
from shoal.plan.drive import Batch, batch_of, decode_pass, prefill_pass
from shoal.plan.skeleton import build_with_generator, embedding_size
from shoal.plan.types import Plan
from shoal.shard import shard

__all__ = ["FLOAT32_TOLERANCE", "FLOAT64_TOLERANCE", "Subject", "compare", "random_subject", "run_plan"]

FLOAT64_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 2e-4
_TOKENS = 9
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Subject:
    """A small model with random weights and what it gives, unsharded."""

    model: nn.Module
    batches: Sequence[Batch]
    expected: list[torch.Tensor]  # outputs of all passes of all batches
    tolerance: float  # relative
    has_decode: bool


def random_subject(model_class: type[nn.Module], config: Any) -> Subject:
    """Build the model in float64, or in float32 where its code cannot compute in float64.

    Raises:
        PlanError: it cannot be run at all, or gives no finite numbers.
    """
    vocabulary = embedding_size(config)
    batches = [
        batch_of(vocabulary, 1, _TOKENS, seed=2),
        batch_of(vocabulary, 2, _TOKENS, seed=3),
        batch_of(vocabulary, 2, _TOKENS, padding=3, seed=4),
    ]
    failure = ""
    for dtype, tolerance in ((torch.float64, FLOAT64_TOLERANCE), (torch.float32, FLOAT32_TOLERANCE)):
        model = random_model(model_class, config, dtype)
        try:
            expected, has_decode = _run(model, batches)
        except Exception as error:  # a model's own code fails in any way, float64 being unusual
            failure = f"{type(error).__name__}: {error}"
            continue
        if all(bool(torch.isfinite(tensor).any()) for tensor in expected):
            return Subject(model, batches, expected, tolerance, has_decode)
        failure = "its outputs are not finite"
    raise PlanError(f"{model_class.__name__} cannot be run to prove a plan: {failure}")


def random_model(model_class: type[nn.Module], config: Any, dtype: torch.dtype) -> nn.Module:
    """The model with random values in everything, so that no wrong slice can hide in zeros or ones."""
    generator = torch.Generator().manual_seed(11)
    model = build_with_generator(model_class, config, generator).to(dtype)
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

    def rank_body(comm: SimulatedComm) -> list[torch.Tensor]:
        model = copy.deepcopy(subject.model)
        shard(model, plan, comm.rank, comm)
        if prepare is not None:
            prepare(model)
        return _run(model, subject.batches)[0]

    try:
        outputs = run_ranks(plan.tp, rank_body, _TIMEOUT_S)
    except PlanError:
        raise
    except Exception as error:  # whatever the model's own code raises on a wrong split
        raise PlanError(f"the sharded model fails: {type(error).__name__}: {error}") from error
    return max(compare(got, subject.expected) for got in outputs)


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
    """All outputs of prefill and, where there is a cache, two decode steps, for every batch."""
    outputs: list[torch.Tensor] = []
    has_decode = False
    for batch in batches:
        prefill = prefill_pass(model, batch)
        outputs += prefill.outputs
        if prefill.cache is not None:
            has_decode = True
            outputs += decode_pass(model, batch, prefill).outputs
    return outputs, has_decode
