"""A plan in numbers, as plain data for people and machines. Knows the plan and a model on meta, no device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from shoal.model.foresee import Foreseen
from shoal.plan.footprint import footprint
from shoal.plan.types import Plan, Split

__all__ = ["ModelFacts", "plan_report"]


@dataclass(frozen=True)
class ModelFacts:
    """What a report needs to know beside the plan."""

    name: str  # as the user named it
    architecture: str
    bytes_per_number: int  # of the dtype that is served, KV pages included
    way: Foreseen | None = None  # how it will be served; None: it makes no text, or that is found out at load


def plan_report(plan: Plan, whole: nn.Module, facts: ModelFacts) -> dict[str, Any]:
    """The plan as plain data.

    Args:
        plan: proved, and made for ``whole``.
        whole: the unsharded model; meta is enough.

    Returns:
        ``coverage`` and ``vocabulary`` are shares of the parameters' bytes; ``split`` of a block is the
        plan's operation, ``components`` what is dealt out (heads, KV groups, neurons): how many there are,
        and how many each rank has. What is not known is None.
    """
    costs = footprint(plan, whole, facts.bytes_per_number)
    return {
        "model": facts.name,
        "architecture": facts.architecture,
        "tp": plan.tp,
        "proved": plan.tp == 1 or plan.evidence.get("proved") is True,
        "coverage": {kind: round(share, 4) for kind, share in asdict(costs.coverage).items()},
        "vocabulary": round(costs.vocabulary, 4),
        "collectives_per_forward": costs.all_reduces + costs.all_gathers if plan.tp > 1 else 0,
        "all_reduces": costs.all_reduces,
        "all_gathers": costs.all_gathers,
        "ranks": [asdict(rank) for rank in costs.ranks],
        "blocks": [_block(plan, pattern, split) for pattern, split in plan.params.items()],
        "reductions": [entry.to_dict() for entry in plan.reductions],
        "kv_cache": plan.evidence.get("kv_cache", "measured" if plan.kv else "unknown: not measured"),
        "way": None if facts.way is None else facts.way._asdict(),
        "evidence": dict(plan.evidence),
    }


def _block(plan: Plan, pattern: str, split: Split) -> dict[str, Any]:
    return {
        "pattern": pattern,
        "split": split.op,
        "components": _components(plan, pattern, split),
        "sizes": list(split.sizes),
        "reason": split.reason,
    }


def _components(plan: Plan, pattern: str, split: Split) -> dict[str, Any] | None:
    """What is dealt out, in all and to each rank: of the region the weight is in, or whole experts."""
    if split.op == "experts":
        return {"total": split.size, "per_rank": list(split.sizes)}
    region = next((r for r in plan.regions if pattern in (r.consumer, *r.producers)), None)
    if region is None or not split.is_split:
        return None
    return {"total": region.components, "per_rank": list(region.shares)}
