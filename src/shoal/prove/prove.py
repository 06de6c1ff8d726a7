"""Proves plans, and makes proved ones. Knows no weights and no devices.

The proof has two halves. The structure: the data flow measured on a small model of the same class must
be what the plan, with that model's widths, says. The numbers: simulated ranks run the production layers
on that model, in prefill, decode and with padding, and must equal the unsharded model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shoal.errors import PlanError
from shoal.plan.derive import derive
from shoal.plan.types import Plan, Scalar, Split
from shoal.prove.cache import load_plan, plan_key, store_plan
from shoal.prove.clone import Clone, find_clone
from shoal.prove.simulate import run_plan
from shoal.prove.substitute import RegionMismatchError, substitute

__all__ = ["plan_and_prove", "prove"]

_log = logging.getLogger("shoal.prove")


def prove(plan: Plan, model_class: type[nn.Module], config: Any) -> dict[str, Scalar]:
    """Prove that ``plan`` is right for its rank count.

    Neither the config nor global state is changed. Runs in any thread.

    Returns:
        evidence: the dtype's tolerance, the largest relative error, the size of the model it was run on.

    Raises:
        PlanError: it is not right, or cannot be shown to be.
    """
    if plan.model_class != model_class.__name__:
        raise PlanError(f"a plan for {plan.model_class}, not for {model_class.__name__}")
    if plan.tp == 1:
        return {"proved": True, "relative_error": 0.0}
    return _prove_numbers(plan, find_clone(plan, model_class, config))


def plan_and_prove(
    model_class: type[nn.Module], config: Any, tp: int, cache_folder: Path | None = None
) -> Plan:
    """Derive a plan and prove it; regions that fail are gathered, and the rest is proved again.

    Args:
        model_class: a transformers model class.
        config: its config.
        tp: number of ranks.
        cache_folder: where proved plans are kept; None keeps none.

    Raises:
        PlanError: not even the plan that gathers everything could be proved.
    """
    if tp == 1:
        return derive(model_class, config, 1)
    key = plan_key(model_class, config, tp)
    cached = load_plan(cache_folder, key) if cache_folder else None
    if cached is not None and _is_proof_of(cached, model_class, tp):
        return cached
    plan = _proved(model_class, config, tp)
    if cache_folder:
        store_plan(cache_folder, key, plan)
    return plan


def _is_proof_of(plan: Plan, model_class: type[nn.Module], tp: int) -> bool:
    is_same = (plan.tp, plan.model_class) == (tp, model_class.__name__)
    return is_same and plan.evidence.get("proved") is True


def _proved(model_class: type[nn.Module], config: Any, tp: int) -> Plan:
    """Derive, prove, exclude what fails, until nothing does."""
    excluded: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    while True:
        plan = derive(model_class, config, tp, excluded, whole)
        clone: Clone | None = None
        try:
            clone = find_clone(plan, model_class, config)
            evidence = _prove_numbers(plan, clone)
        except PlanError as error:
            guilty = _guilty(plan, clone, error)
            if not guilty.found:
                raise PlanError(f"{model_class.__name__} over {tp} ranks: {error}") from error
            for name in sorted(guilty.regions | guilty.patterns):
                _log.warning("%s is not split as measured, its proof failed: %s", name, error)
            excluded |= guilty.regions
            whole |= guilty.patterns
        else:
            return replace(plan, evidence={**plan.evidence, **evidence})


def _prove_numbers(plan: Plan, clone: Clone) -> dict[str, Scalar]:
    subject = clone.subject
    error = run_plan(substitute(plan, clone.small), subject)
    if not error <= subject.tolerance:
        raise PlanError(
            f"the sharded model differs from the whole one: relative error {error:.1e}, "
            f"{subject.tolerance:.0e} is allowed"
        )
    return {
        "proved": True,
        "relative_error": error,
        "tolerance": subject.tolerance,
        "proof_elements": clone.elements,
        "proof_decode": subject.has_decode,
        "proof_attention": " ".join(subject.attention),
    }


# ------------------------------------------------------------------ finding what is wrong


@dataclass(frozen=True, slots=True)
class _Guilty:
    """Regions (consumers) to gather, and patterns to replicate."""

    regions: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()

    @property
    def found(self) -> bool:
        return bool(self.regions or self.patterns)


def _guilty(plan: Plan, clone: Clone | None, error: PlanError) -> _Guilty:
    """Which regions fail on their own; if none do, which of the other patterns; if none, all regions.

    Every plan has something guilty, or nothing split: the search for a provable plan ends.
    """
    consumers = frozenset(region.consumer for region in plan.regions)
    if isinstance(error, RegionMismatchError):
        hit = frozenset(name for name in consumers if name.startswith(error.place))
        return _Guilty(hit or consumers)
    if clone is None:
        return _Guilty(consumers)
    regions = frozenset(name for name in consumers if not _holds(keep_regions(plan, [name]), clone))
    if regions:
        return _Guilty(regions)
    owned = {name for region in plan.regions for name in (region.consumer, *region.producers)}
    others = frozenset(name for name, split in plan.params.items() if split.is_split and name not in owned)
    patterns = frozenset(name for name in others if not _holds(_keep_patterns(plan, name), clone))
    if patterns:
        return _Guilty(patterns=patterns)
    return _Guilty(consumers) if consumers else _Guilty(patterns=others)


def _holds(plan: Plan, clone: Clone) -> bool:
    try:
        _prove_numbers(plan, clone)
    except PlanError:
        return False
    return True


def keep_regions(plan: Plan, consumers: Iterable[str]) -> Plan:
    """``plan`` with only these regions split; all other weights whole."""
    kept = tuple(region for region in plan.regions if region.consumer in set(consumers))
    names = {name for region in kept for name in (region.consumer, *region.producers)}
    homes = {name.rsplit(".", 2)[0] for name in names}
    raw = {name for name in plan.params if any(name.startswith(f"{home}.") for home in homes)}
    params = {
        name: split if name in names or (name in raw and split.op == "column") else _WHOLE
        for name, split in plan.params.items()
    }
    patches = tuple(patch for patch in plan.patches if _is_near(patch.module, homes))
    args = tuple(argument for argument in plan.args if _is_near(argument.module, homes))
    return replace(plan, params=params, regions=kept, patches=patches, args=args)


def _keep_patterns(plan: Plan, pattern: str) -> Plan:
    """``plan`` with only one pattern outside the regions split, and what is tied to it."""
    params = {
        name: split if name == pattern or _same_cut(split, plan.params[pattern]) else _WHOLE
        for name, split in plan.params.items()
    }
    return replace(plan, params=params, regions=(), patches=(), args=())


def _same_cut(split: Split, other: Split) -> bool:
    """Tied weights are cut alike, and only together."""
    return split.op in ("gather", "vocab") and (split.dim, split.size, split.ranges) == (
        other.dim,
        other.size,
        other.ranges,
    )


def _is_near(module: str, homes: Iterable[str]) -> bool:
    return any(
        module == home or module.startswith(f"{home}.") or home.startswith(f"{module}.") for home in homes
    )


_WHOLE = Split("replicate", reason="left out")
