"""A plan in numbers: bytes, heads and collectives per rank. Knows the plan and a model on meta, no device.

Everything is counted on the model's own tensors, so it holds for any layout; a tied tensor counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.plan.slices import direct_tensors, slices
from shoal.plan.types import Plan, Split, TensorSlice

__all__ = ["ModelFacts", "plan_report"]

_KIND = {"column": "column_row", "row": "column_row", "vocab": "column_row", "gather": "gathered"}
_COLLECTIVE = ("row", "gather", "vocab")  # operations that end in one


@dataclass(frozen=True)
class ModelFacts:
    """What a report needs to know beside the plan."""

    name: str  # as the user named it
    architecture: str
    num_attention_heads: int | None
    kv_bytes_per_number: int  # of the dtype that is served


def plan_report(plan: Plan, whole: nn.Module, facts: ModelFacts) -> dict[str, Any]:
    """The plan as plain data.

    Args:
        plan: proved, and made for ``whole``.
        whole: the unsharded model; meta is enough, its dtype is the one served.

    Returns:
        ``coverage`` is in shares of the weight bytes; ``split`` of a block is the plan's operation.
    """
    return {
        "model": facts.name,
        "architecture": facts.architecture,
        "tp": plan.tp,
        "proved": True,
        "coverage": _coverage(plan, whole),
        "collectives_per_forward": _num_collectives(plan, whole),
        "ranks": [_rank(plan, whole, facts, rank) for rank in range(plan.tp)],
        "blocks": [_block(plan, pattern, split) for pattern, split in plan.params.items()],
    }


def _unique_tensors(whole: nn.Module) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, module, attribute in direct_tensors(whole):
        tensor = getattr(module, attribute)
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _coverage(plan: Plan, whole: nn.Module) -> dict[str, float]:
    sums = {"column_row": 0, "gathered": 0, "replicated": 0}
    cut = slices(plan, whole, 0)
    for name, tensor in _unique_tensors(whole):
        split = plan.split_of(name) or plan.split_of(name.removesuffix("bias") + "weight")
        kind = _KIND[split.op] if name in cut and split is not None else "replicated"
        sums[kind] += tensor.nbytes
    total = sum(sums.values())
    return {kind: round(count / total, 4) for kind, count in sums.items()}


def _num_collectives(plan: Plan, whole: nn.Module) -> int:
    if plan.tp == 1:
        return 0
    splits = (plan.split_of(name) for name, _, _ in direct_tensors(whole))
    return sum(split is not None and split.op in _COLLECTIVE for split in splits)


def _rank(plan: Plan, whole: nn.Module, facts: ModelFacts, rank: int) -> dict[str, Any]:
    cut = slices(plan, whole, rank)
    weight_bytes = sum(_bytes(tensor, cut.get(name)) for name, tensor in _unique_tensors(whole))
    kv_numbers = sum(
        entry.num_layers * entry.heads[rank] * (entry.key_dim + entry.value_dim) for entry in plan.kv
    )
    return {
        "rank": rank,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": kv_numbers * facts.kv_bytes_per_number,
        "heads": _num_heads(plan, facts.num_attention_heads, rank),
        "kv_heads": max((entry.heads[rank] for entry in plan.kv), default=None),
    }


def _bytes(tensor: Any, piece: TensorSlice | None) -> int:
    whole = int(tensor.nbytes)
    return whole if piece is None else whole // int(tensor.shape[piece.dim]) * piece.length


def _num_heads(plan: Plan, num_heads: int | None, rank: int) -> int | None:
    """Query heads of the rank: its share of the region that deals out heads or groups of them.

    All of them where no region does. The region's components divide the heads, and as there may be
    another such region by chance, the one whose shares the KV heads follow is taken first.
    """
    if num_heads is None:
        return None
    dealt = [region for region in plan.regions if region.components and num_heads % region.components == 0]
    by_kv = [region for region in dealt if any(region.shares == entry.heads for entry in plan.kv)]
    for region in (*by_kv, *dealt):
        return region.shares[rank] * (num_heads // region.components)
    return num_heads


def _block(plan: Plan, pattern: str, split: Split) -> dict[str, Any]:
    region = next((r for r in plan.regions if pattern in (r.consumer, *r.producers)), None)
    return {
        "pattern": pattern,
        "split": split.op,
        "components": None if region is None else region.components,
        "sizes": list(split.sizes),
        "reason": split.reason,
    }
