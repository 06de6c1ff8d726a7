"""One cell of the grid: a family's model on real ranks against the whole model. Plans nothing.

The reference is computed once, in the test's own process; ranks build the same model from its seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.comm.base import Comm
from shoal.plan.types import Plan
from shoal.shard import shard
from support.zoo.build import build
from support.zoo.catalogue import family_of
from support.zoo.family import Family
from support.zoo.inputs import Padding, floating_outputs, forward_inputs, generate_inputs

__all__ = [
    "NEW_TOKENS",
    "TOLERANCE",
    "Answer",
    "CountingComm",
    "Expected",
    "Reference",
    "compare",
    "make_reference",
    "run_cell",
]

NEW_TOKENS = 8
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
_HUGE = 1e30  # "minus infinity" as some models write it: no number to measure others by


@dataclass(frozen=True)
class Expected:
    """What the whole model gives for one padding."""

    padding: Padding
    dtype: torch.dtype
    outputs: list[torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """What the whole model gives: one forward a padding, and greedy tokens where it generates."""

    forwards: tuple[Expected, ...]
    dtype: torch.dtype | None  # of the generation; None: the family does not generate
    tokens: list[list[int]]


@dataclass(frozen=True)
class Answer:
    """What one rank found."""

    errors: tuple[float, ...]  # relative, one a forward of the reference
    tokens: list[list[int]]
    all_reduces: int  # of one forward
    all_gathers: int


def make_reference(family: Family, attention: str) -> Reference:
    """In float64, or in float32 where the model's own code gives no finite numbers in float64."""
    forwards = tuple(_expected(family, attention, padding) for padding in ("left", "right"))
    if not family.can_generate:
        return Reference(forwards, None, [])
    # A prompt is padded left, unless an encoder reads it.
    wide = forwards[1 if family.kind == "seq2seq" else 0].dtype
    for dtype in dict.fromkeys((wide, torch.float32)):
        try:
            return Reference(forwards, dtype, generate(family, build(family, attention, dtype)))
        except RuntimeError as error:
            failure = error  # some code mixes dtypes in float64
    raise AssertionError(f"{family.name} does not generate") from failure


def _expected(family: Family, attention: str, padding: Padding) -> Expected:
    failure = "its outputs are not finite"
    for dtype in TOLERANCE:
        model = build(family, attention, dtype)
        try:
            outputs = forward(family, model, padding)
        except (RuntimeError, TypeError) as error:
            failure = str(error)
            continue
        if all(bool(torch.isfinite(tensor).all()) for tensor in outputs):
            return Expected(padding, dtype, outputs)
    raise AssertionError(f"{family.name} cannot be run: {failure}")


@torch.no_grad()
def forward(family: Family, model: Any, padding: Padding) -> list[torch.Tensor]:
    outputs = floating_outputs(model(**forward_inputs(family, model, padding)))
    assert outputs, f"{family.name} gives no floating-point output"
    return outputs


@torch.no_grad()
def generate(family: Family, model: Any) -> list[list[int]]:
    """Greedy, with whatever cache the model keeps."""
    tokens: torch.Tensor = model.generate(
        **generate_inputs(family, model),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
    )
    return tokens.tolist()


def run_cell(comm: Comm, name: str, plan: dict[str, Any], attention: str, reference: Reference) -> Answer:
    """A rank's side: its part of the model, run like the whole one."""
    family = family_of(name)
    counting = CountingComm(comm)
    sharded = {dtype: _sharded(family, plan, attention, dtype, counting) for dtype in _dtypes(reference)}
    errors = tuple(
        compare(forward(family, sharded[expected.dtype], expected.padding), expected.outputs)
        for expected in reference.forwards
    )
    counts = [counting.calls[name] // len(errors) for name in ("all_reduce", "all_gather")]
    tokens = generate(family, sharded[reference.dtype]) if reference.dtype is not None else []
    return Answer(errors, tokens, *counts)


class CountingComm:
    """A rank's end of a group that counts what is called."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._inner, name)


def _dtypes(reference: Reference) -> Sequence[torch.dtype]:
    used = {expected.dtype for expected in reference.forwards} | {reference.dtype}
    return [dtype for dtype in TOLERANCE if dtype in used]


def _sharded(family: Family, plan: dict[str, Any], attention: str, dtype: torch.dtype, comm: Comm) -> Any:
    model = build(family, attention, dtype)
    shard(model, Plan.from_dict(plan), comm.rank, comm)
    return model


def compare(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference relative to the largest expected value of the same output.

    Values as large as a model's "minus infinity" must be so large in both, and count no further.
    """
    if [tensor.shape for tensor in got] != [tensor.shape for tensor in expected]:
        return float("inf")
    worst = 0.0
    for ours, theirs in zip(got, expected, strict=True):
        is_number = theirs.abs() < _HUGE
        if not torch.equal(ours.abs() < _HUGE, is_number):
            return float("inf")
        if bool(is_number.any()):
            scale = theirs[is_number].abs().amax().clamp(min=1e-30)
            worst = max(worst, float((ours[is_number] - theirs[is_number]).abs().amax() / scale))
    return worst
