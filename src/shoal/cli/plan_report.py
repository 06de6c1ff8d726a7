"""A plan in numbers, as plain data for people and machines. Knows the plan and a model on meta, no device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from shoal.plan.footprint import RankFootprint, footprint
from shoal.plan.types import Plan, Split

__all__ = ["ModelFacts", "plan_report"]


@dataclass(frozen=True)
class ModelFacts:
    """What a report needs to know beside the plan."""

    name: str  # as the user named it
    architecture: str
    bytes_per_number: int  # of the dtype that is served, KV pages included


def plan_report(plan: Plan, whole: nn.Module, facts: ModelFacts) -> dict[str, Any]:
    """The plan as plain data.

    Args:
        plan: proved, and made for ``whole``.
        whole: the unsharded model; meta is enough.

    Returns:
        ``coverage`` is in shares of the parameters; ``split`` of a block is the plan's operation.
    """
    costs = footprint(plan, whole, facts.bytes_per_number)
    return {
        "model": facts.name,
        "architecture": facts.architecture,
        "tp": plan.tp,
        "proved": True,
        "coverage": {kind: round(share, 4) for kind, share in asdict(costs.coverage).items()},
        "collectives_per_forward": costs.all_reduces + costs.all_gathers if plan.tp > 1 else 0,
        "ranks": [_rank(plan, rank) for rank in costs.ranks],
        "blocks": [_block(plan, pattern, split) for pattern, split in plan.params.items()],
    }


def _rank(plan: Plan, cost: RankFootprint) -> dict[str, Any]:
    numbers: dict[str, Any] = asdict(cost)
    if not plan.kv:  # not measured, which is not the same as none
        numbers["kv_bytes_per_token"] = numbers["kv_heads"] = None
    return numbers


def _block(plan: Plan, pattern: str, split: Split) -> dict[str, Any]:
    region = next((r for r in plan.regions if pattern in (r.consumer, *r.producers)), None)
    return {
        "pattern": pattern,
        "split": split.op,
        "components": None if region is None else region.components,
        "sizes": list(split.sizes),
        "reason": split.reason,
    }
