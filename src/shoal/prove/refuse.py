"""What a policy asks for and a proof does not bear out is refused, with the size of the error. Knows no
policy: splits that are there for its sake say so by their reason.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch

from shoal.errors import PlanError
from shoal.plan.asked import is_asked, is_left_over
from shoal.plan.slices import direct_tensors
from shoal.plan.types import Plan, Split, pattern_of
from shoal.prove.clone import Clone
from shoal.prove.simulate import compare, run_plan, run_whole
from shoal.prove.substitute import RegionMismatchError, substitute

__all__ = ["asked_patterns", "keep_asked", "refuse_wrong_wishes", "wrong_together"]


def asked_patterns(plan: Plan) -> list[str]:
    """Weights that are split as the policy says and not as was measured; those that were, but for another
    wish, last.
    """
    asked = {name: split for name, split in plan.params.items() if is_asked(split) and split.is_split}
    return sorted(asked, key=lambda name: is_left_over(asked[name]))


def refuse_wrong_wishes(plan: Plan, clone: Clone) -> None:
    """Try each split that is there for the policy's sake with all other weights whole.

    Raises:
        PlanError: one is wrong; the message names the weight and has the size of the error.
    """
    for pattern in asked_patterns(plan):
        alone = keep_asked(plan, [pattern])
        try:
            error = run_plan(substitute(alone, clone.small), clone.subject)
        except RegionMismatchError as mismatch:
            raise PlanError(
                f"{_what(plan, pattern)}: no small model shows whether it is right: {mismatch}"
            ) from mismatch
        except PlanError as failure:
            size = _size_of_error(plan, pattern, clone)
            raise PlanError(f"{_what(plan, pattern)}: {_wanted(size, clone)}: {failure}") from failure
        if not error <= clone.subject.tolerance:
            size = error if math.isfinite(error) else _size_of_error(plan, pattern, clone)
            raise PlanError(f"{_what(plan, pattern)}: {_wanted(size, clone)}")


def wrong_together(plan: Plan, error: PlanError) -> PlanError:
    """What to raise where the policy's splits fail, and none of them does alone."""
    asked = ", ".join(f"{name} as {plan.params[name].op}" for name in asked_patterns(plan))
    return PlanError(f"policy: {asked}: together they are wrong: {error}")


def keep_asked(plan: Plan, patterns: list[str]) -> Plan:
    """``plan`` with only these of the policy's splits, and what can only be split together with them."""
    kept = set(patterns)
    for reduction in plan.reductions:
        if kept & set(reduction.weights):
            kept |= set(reduction.weights)
    alike = [plan.params[name] for name in kept]
    params = {
        name: split if name in kept or _is_tied_cut(split, alike) else Split("replicate", reason="left out")
        for name, split in plan.params.items()
    }
    reductions = tuple(entry for entry in plan.reductions if set(entry.weights) <= kept)
    return replace(plan, params=params, regions=(), patches=(), args=(), reshapes=(), reductions=reductions)


def _is_tied_cut(split: Split, others: list[Split]) -> bool:
    """Tied weights are cut alike, and only together."""
    return split.op in ("gather", "vocab") and any(
        (split.dim, split.size, split.ranges) == (other.dim, other.size, other.ranges)
        for other in others
        if other.op in ("gather", "vocab")
    )


def _what(plan: Plan, pattern: str) -> str:
    return f"policy: {pattern.removesuffix('.weight')} as {plan.params[pattern].op}"


def _wanted(error: float, clone: Clone) -> str:
    return f"relative error {error:.2g} where {clone.subject.tolerance:.0e} is allowed"


def _size_of_error(plan: Plan, pattern: str, clone: Clone) -> float:
    """How wrong a split is whose shapes do not even fit: with the shapes made to fit.

    Column without a gather: a rank knows only its own output features, the others are zero. Row without
    its inputs split: every rank has the whole result, and the sum is as many times too large.
    """
    split = plan.params[pattern]
    run = clone.subject.runs[0]
    model = copy.deepcopy(run.model)
    with torch.no_grad():
        for name, module, attribute in list(direct_tensors(model)):
            weight = getattr(module, attribute)
            if pattern_of(name) == pattern and split.op == "row":
                weight.mul_(plan.tp)
            elif pattern_of(name) == pattern:
                _forget_others(weight, split, split.dim)
            elif split.bias == "split" and pattern_of(name) == f"{pattern.removesuffix('weight')}bias":
                _forget_others(weight, split, 0)
    try:
        return compare(run_whole(model, run.batches), run.expected)
    except Exception:  # the model's own code; its failure as it stands is told in any case
        return float("inf")


def _forget_others(tensor: torch.Tensor, split: Split, dim: int) -> None:
    """Zero the output features that rank 0 does not hold."""
    own = sum(stop - start for start, stop in split.ranges[0])
    kept = tensor.shape[dim] * own // max(1, split.size)
    tensor.narrow(dim, kept, tensor.shape[dim] - kept).zero_()
