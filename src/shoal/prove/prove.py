"""Proves plans, and makes proved ones. Knows no weights and no devices.

The proof has two halves. The structure: the data flow measured on a small model of the same class must
be what the plan, with that model's widths, says. The numbers: simulated ranks run the production layers
on that model, in prefill, decode and with padding, and must equal the unsharded model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from shoal.errors import PlanError
from shoal.plan.derive import derive
from shoal.plan.policy import Policy, read_policy
from shoal.plan.random import seeds_undone
from shoal.plan.skeleton import build_on_meta
from shoal.plan.slices import slices
from shoal.plan.types import Plan, Scalar
from shoal.prove.blame import find_guilty
from shoal.prove.cache import has_source, load_plan, plan_key, store_plan
from shoal.prove.clone import Clone, find_clone
from shoal.prove.refuse import asked_patterns, refuse_wrong_wishes, wrong_together
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
    with seeds_undone():
        slices(plan, build_on_meta(model_class, config), 0)  # refuses a plan of other widths
        clone = find_clone(plan, model_class, config)
        try:
            return _prove_numbers(plan, clone)
        except PlanError as error:
            regions, patterns = _to_give_up(plan, clone, error, is_strict=True)
            raise PlanError(f"{', '.join(sorted(regions | patterns))}: {error}") from error


def plan_and_prove(
    model_class: type[nn.Module],
    config: Any,
    tp: int,
    cache_folder: Path | None = None,
    policy: Policy | Mapping[Any, Any] | str | Path | None = None,
    anew: bool = False,
) -> Plan:
    """Derive a plan and prove it; regions that fail are gathered, and the rest is proved again.

    Args:
        model_class: a transformers model class.
        config: its config.
        tp: number of ranks.
        cache_folder: where proved plans are kept; None keeps none.
        policy: what the user asks for (:mod:`shoal.plan.policy`).
        anew: prove even what is in the cache, and refuse where a part that was measured to be right fails
            its proof, in place of gathering it.

    Raises:
        PlanError: not even the plan that gathers everything could be proved; or the policy asks for what
            is wrong, and the message names the weight and the size of the error.
        UsageError: the policy cannot be understood, or names what the model does not have.
    """
    policy = read_policy(policy)
    if tp == 1:
        with seeds_undone():
            return derive(model_class, config, 1, policy=policy)
    if not has_source(model_class):
        cache_folder = None
    key = plan_key(model_class, config, tp, policy.text() if policy else "")
    cached = load_plan(cache_folder, key) if cache_folder and not anew else None
    if cached is not None and _is_proof_of(cached, model_class, tp):
        return cached
    with seeds_undone():
        plan = _proved(model_class, config, tp, policy, anew)
    if cache_folder:
        store_plan(cache_folder, key, plan)
    return plan


def _is_proof_of(plan: Plan, model_class: type[nn.Module], tp: int) -> bool:
    is_same = (plan.tp, plan.model_class) == (tp, model_class.__name__)
    return is_same and plan.evidence.get("proved") is True


def _proved(
    model_class: type[nn.Module], config: Any, tp: int, policy: Policy | None, is_strict: bool
) -> Plan:
    """Derive, prove, exclude what fails, until nothing does."""
    excluded: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    while True:
        plan = derive(model_class, config, tp, excluded, whole, policy)
        clone: Clone | None = None
        try:
            clone = find_clone(plan, model_class, config)
            evidence = _prove_numbers(plan, clone)
        except PlanError as error:
            regions, patterns = _to_give_up(plan, clone, error, is_strict)
            if not regions and not patterns:
                raise PlanError(f"{model_class.__name__} over {tp} ranks: {error}") from error
            for name in sorted(regions | patterns):
                _log.warning("%s is not split as measured, its proof failed: %s", name, error)
            excluded |= regions
            whole |= patterns
        else:
            return replace(plan, evidence={**plan.evidence, **evidence})


def _to_give_up(
    plan: Plan, clone: Clone | None, error: PlanError, is_strict: bool
) -> tuple[frozenset[str], frozenset[str]]:
    """Consumers whose regions are to be gathered, and patterns to be replicated, for the rest to prove.

    Raises:
        PlanError: what fails is not for us to give up: the policy asks for it, or the caller is strict.
    """
    if clone is not None:
        refuse_wrong_wishes(plan, clone)
    guilty = find_guilty(plan, error, clone is not None, lambda part: _holds(part, clone))
    asked = set(asked_patterns(plan))
    if asked & guilty.patterns or (asked and not guilty.regions):
        raise wrong_together(plan, error)
    names = sorted(guilty.regions | guilty.patterns)
    if is_strict and names and clone is not None and not isinstance(error, RegionMismatchError):
        raise PlanError(f"{', '.join(names)}: measured to be right, but its proof fails: {error}")
    return guilty.regions, guilty.patterns


def _holds(plan: Plan, clone: Clone | None) -> bool:
    try:
        assert clone is not None, "a part is only tried where there is a model to try it on"
        _prove_numbers(plan, clone)
    except PlanError:
        return False
    return True


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
