"""Runs a plan for real on a small model: simulated ranks, production layers, against the unsharded
model. Knows no planning.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import PlanError
from shoal.plan.drive import Batch, Pass, batch_of, decode_pass, prefill_pass, restored, with_special_inputs
from shoal.plan.random import own_random
from shoal.plan.skeleton import build_with_generator, embedding_size
from shoal.plan.survey import long_batch
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
    "run_whole",
]

FLOAT64_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 2e-4
_TOKENS = 11  # no rank count divides it that also divides widths: nothing fits by chance
_TIMEOUT_S = 120.0
_HUGE = 1e30
_log = logging.getLogger("shoal.prove")


@dataclass(frozen=True, slots=True)
class Run:
    """A model with random weights, what it is fed, and what it gives, unsharded."""

    model: nn.Module
    batches: Sequence[Batch]
    expected: list[torch.Tensor]  # outputs of all passes of all batches
    decodes: tuple[bool, ...]  # which batches a decode step follows
    tolerance: float  # relative


@dataclass(frozen=True, slots=True)
class Subject:
    """What a plan is proved on: the same model computed in several ways.

    With eager attention and, where it has that, with SDPA, because code may come out right under one only:
    eager products broadcast where SDPA does not. With experts one by one, and the way that the config says
    or that transformers chooses, in which a rank's experts are other operations.
    """

    runs: tuple[Run, ...]
    tolerance: float  # relative, of the first run
    attention: tuple[str, ...]

    @property
    def has_decode(self) -> bool:
        """Whether a cache was kept and gone on from."""
        return any(self.runs[0].decodes)


def random_subject(model_class: type[nn.Module], config: Any, long_tokens: int = 0) -> Subject:
    """Build the model in float64, or in float32 where its code cannot compute in float64.

    Args:
        model_class: a transformers model class.
        config: of a model small enough to be computed.
        long_tokens: a number of tokens at which it is run too, 0 for none.

    Raises:
        PlanError: it cannot be run at all, or gives no finite numbers.
    """
    vocabulary = embedding_size(config)
    plain = [batch_of(vocabulary, rows, _TOKENS, seed=rows) for rows in (1, 2)]
    padded = batch_of(vocabulary, 2, _TOKENS, padding=3, seed=4)
    further = [with_special_inputs(model_class, config, padded)]
    further += [long_batch(vocabulary, long_tokens, padding=3)] if long_tokens else []
    special = [batch for batch in further if batch is not None]
    failure = ""
    for dtype, tolerance in ((torch.float64, FLOAT64_TOLERANCE), (torch.float32, FLOAT32_TOLERANCE)):
        try:
            eager = _reference(model_class, config, dtype, "eager", [*plain, padded], special)
        except Exception as error:  # a model's own code fails in any way, float64 being unusual
            failure = f"{type(error).__name__}: {error}"
            continue
        further_runs, attention = _in_other_ways(model_class, config, dtype, [padded], special)
        return Subject((eager, *further_runs), tolerance, ("eager", *attention))
    raise PlanError(f"{model_class.__name__} cannot be run to prove a plan: {failure}")


def _in_other_ways(
    model_class: type[nn.Module],
    config: Any,
    dtype: torch.dtype,
    batches: Sequence[Batch],
    special: Sequence[Batch],
) -> tuple[list[Run], list[str]]:
    """Runs as the model is computed when it is used, and what attention they have.

    torch's ``grouped_mm``, which transformers takes for stacks of experts, has no float64: where the model's
    own way fails in the proof's dtype, it is run in float32, and SDPA without it.
    """

    def first_of(*ways: tuple[torch.dtype, str, str | None]) -> list[Run]:
        for precision, attention, kind in ways:
            try:
                return [_reference(model_class, config, precision, attention, batches, special, kind)]
            except Exception as error:  # not every model has SDPA, not every way of experts takes every size
                way = f"{attention} attention and {kind or 'its own'} experts in {precision}"
                _log.debug("%s is proved without %s: %s", model_class.__name__, way, error)
        return []

    own = first_of((dtype, "sdpa", None))
    if own or not getattr(model_class, "_can_set_experts_implementation", bool)():
        return own, ["sdpa"] * len(own)
    low = torch.float32
    sdpa = first_of((dtype, "sdpa", "eager"))
    experts = first_of((low, "sdpa", None), (dtype, "eager", None), (low, "eager", None))
    return [*sdpa, *experts], ["sdpa"] * len(sdpa)


def _reference(
    model_class: type[nn.Module],
    config: Any,
    dtype: torch.dtype,
    attention: str,
    batches: Sequence[Batch],
    special: Sequence[Batch],
    experts: str | None = "eager",
) -> Run:
    """The unsharded model's outputs, for special batches too where it gives usable ones."""
    model = random_model(model_class, config, dtype, attention, experts)
    expected, decodes = _run(model, batches)
    if not _are_usable(expected, dtype):
        raise PlanError("its outputs are not finite")
    tolerance = FLOAT64_TOLERANCE if dtype is torch.float64 else FLOAT32_TOLERANCE
    run = Run(model, batches, expected, decodes, tolerance)
    for batch in special:
        try:
            further, steps = _run(model, [batch])
        except Exception as error:  # the model's own code may want its arguments otherwise
            _log.info("%s is proved without a special batch: %s", model_class.__name__, error)
            continue
        if _are_usable(further, dtype):
            run = replace(
                run,
                batches=[*run.batches, batch],
                expected=[*run.expected, *further],
                decodes=(*run.decodes, *steps),
            )
    return run


def _are_usable(outputs: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether outputs say something: all finite, or in float32, the last resort, some of each, for there a
    model may mean its infinities; in float64 they would hide what they meet.
    """
    finite = [torch.isfinite(tensor) for tensor in outputs]
    return all(bool(entry.all() if dtype is torch.float64 else entry.any()) for entry in finite)


def random_model(
    model_class: type[nn.Module],
    config: Any,
    dtype: torch.dtype,
    attention: str = "eager",
    experts: str | None = "eager",
) -> nn.Module:
    """The model with random values in everything, so that no wrong slice can hide in zeros or ones."""
    generator = torch.Generator().manual_seed(11)
    model = build_with_generator(model_class, config, generator, attention, experts).to(dtype)
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
        the largest relative error of any output on any rank; that of a run with another tolerance than the
        subject's counts in proportion.

    Raises:
        PlanError: the sharded model cannot be run, or ranks or shapes differ.
    """

    def rank_body(comm: SimulatedComm) -> float:
        worst = 0.0
        for run in subject.runs:
            # Ranks share the weights that are not cut, unless somebody may write into them.
            shared = {} if prepare else {id(weight): weight for weight in run.model.parameters()}
            model = copy.deepcopy(run.model, shared)
            shard(model, plan, comm.rank, comm)
            if prepare is not None:
                prepare(model)
            error = compare(_run(model, run.batches, run.decodes)[0], run.expected)
            worst = max(worst, error * (subject.tolerance / run.tolerance))
        return worst

    try:
        return max(run_ranks(plan.tp, rank_body, _TIMEOUT_S))
    except PlanError:
        raise
    except Exception as error:  # whatever the model's own code raises on a wrong split
        raise PlanError(f"the sharded model fails: {type(error).__name__}: {error}") from error


def compare(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the spread of the expected values; infinite if shapes differ.

    What is huge (a mask's "minus infinity", written as the least number of some dtype) is no number to
    measure others by: it must be huge, with the same sign, on both sides.
    """
    if len(got) != len(expected) or any(a.shape != b.shape for a, b in zip(got, expected, strict=True)):
        return float("inf")
    worst = 0.0
    for ours, theirs in zip(got, expected, strict=True):
        if not torch.equal(_kinds_of_numbers(ours), _kinds_of_numbers(theirs)):
            return float("inf")
        usual = theirs.abs() <= _HUGE  # not so: what is NaN
        if bool(usual.any()):
            scale = float(theirs[usual].abs().amax().clamp(min=1e-30))
            worst = max(worst, float((ours[usual] - theirs[usual]).abs().amax()) / scale)
    return worst


def _kinds_of_numbers(values: torch.Tensor) -> torch.Tensor:
    """Per value 0 if it is usual, 1 or -1 if it is huge or infinite, 2 if it is NaN."""
    huge = (values > _HUGE).int() - (values < -_HUGE).int()
    return torch.where(torch.isnan(values), 2, huge)


def run_whole(model: nn.Module, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """All outputs of an unsharded model, to be compared with those of another."""
    return _run(model, batches)[0]


@torch.no_grad()
def _run(
    model: nn.Module, batches: Sequence[Batch], decodes: Sequence[bool] | None = None
) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
    """All outputs, and which batches were followed by a decode step.

    Args:
        model: is left as it was.
        batches: run one after the other.
        decodes: which of them a decode step has to follow; None: those that leave a cache which the model
            can be driven on from.
    """
    outputs: list[torch.Tensor] = []
    done: list[bool] = []
    for number, batch in enumerate(batches):
        with restored(model), own_random():  # the same state and the same draws whatever ran before
            prefill = prefill_pass(model, batch)
            outputs += prefill.outputs
            further: Sequence[torch.Tensor] = ()
            if decodes is None and prefill.carried:
                further = _tried_decode(model, batch, prefill)
            elif decodes is not None and decodes[number]:
                further = decode_pass(model, batch, prefill).outputs
            outputs += further
            done.append(bool(further))
    return outputs, tuple(done)


def _tried_decode(model: nn.Module, batch: Batch, prefill: Pass) -> Sequence[torch.Tensor]:
    """Outputs of a decode step; none where the unsharded model cannot be driven through one as we do it."""
    try:
        return decode_pass(model, batch, prefill).outputs
    except Exception as error:  # the model's own code may want its cache or its arguments otherwise
        _log.info("%s is proved without a decode step: %s", type(model).__name__, error)
        return ()
