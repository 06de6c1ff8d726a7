"""What a plan costs each rank, by arithmetic on shapes. Knows no device and measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal.plan.linears import is_splittable
from shoal.plan.slices import direct_tensors, slices
from shoal.plan.types import Plan

__all__ = ["Coverage", "Footprint", "RankFootprint", "footprint"]


@dataclass(frozen=True, slots=True)
class RankFootprint:
    """What one rank holds."""

    rank: int
    weight_bytes: int  # parameters and buffers, tied ones once
    kv_bytes_per_token: int  # keys and values, all layers
    heads: int  # query heads; 0 where unknown
    kv_heads: int  # the most in any layer; 0 where there is no KV cache


@dataclass(frozen=True, slots=True)
class Coverage:
    """Shares of the model's parameter elements, adding up to 1."""

    column_row: float  # split without any exchange between producer and consumer
    gathered: float  # split, with outputs gathered or summed right away
    replicated: float  # whole on every rank


@dataclass(frozen=True, slots=True)
class Footprint:
    """The whole plan's cost."""

    ranks: tuple[RankFootprint, ...]
    coverage: Coverage
    all_reduces: int  # per forward, if every module runs once
    all_gathers: int


def footprint(plan: Plan, model: nn.Module, dtype_bytes: int, kv_dtype_bytes: int | None = None) -> Footprint:
    """Bytes per rank.

    Args:
        plan: made for the model.
        model: the whole, unsharded model (on meta is enough).
        dtype_bytes: per floating-point parameter; buffers count at the size they have.
        kv_dtype_bytes: per KV cache element; ``dtype_bytes`` if None.

    Raises:
        PlanError: plan and model do not fit.
    """
    kv_bytes = dtype_bytes if kv_dtype_bytes is None else kv_dtype_bytes
    ranks = tuple(
        RankFootprint(
            rank,
            _weight_bytes(plan, model, rank, dtype_bytes),
            sum(entry.num_layers * entry.heads[rank] * (entry.key_dim + entry.value_dim) for entry in plan.kv)
            * kv_bytes,
            _heads(plan, model, rank),
            max((entry.heads[rank] for entry in plan.kv), default=0),
        )
        for rank in range(plan.tp)
    )
    operations = [
        split.op
        for name, module in model.named_modules()
        if is_splittable(module) and (split := plan.split_of(f"{name}.weight"))
    ]
    reduces = operations.count("row") + operations.count("vocab")
    return Footprint(ranks, _coverage(plan, model), reduces, operations.count("gather"))


def _weight_bytes(plan: Plan, model: nn.Module, rank: int, dtype_bytes: int) -> int:
    """Bytes of the rank's unique storages."""
    cuts = slices(plan, model, rank) if plan.tp > 1 else {}
    sizes: dict[int, int] = {}
    for name, module, attribute in direct_tensors(model):
        tensor = getattr(module, attribute)
        elements = tensor.numel()
        if name in cuts:
            elements = elements // tensor.shape[cuts[name].dim] * cuts[name].length
        is_weight = attribute in module._parameters and tensor.is_floating_point()
        key = tensor.untyped_storage()._cdata
        sizes[key] = max(sizes.get(key, 0), elements * (dtype_bytes if is_weight else tensor.element_size()))
    return sum(sizes.values())


def _coverage(plan: Plan, model: nn.Module) -> Coverage:
    counts = {"column_row": 0, "gathered": 0, "replicated": 0}
    total = 0
    for name, parameter in model.named_parameters():
        split = plan.split_of(name) or plan.split_of(f"{name.rpartition('.')[0]}.weight")
        kind = "replicated"
        if split is not None and split.op in ("column", "row"):
            kind = "column_row"
        elif split is not None and split.op in ("gather", "vocab"):
            kind = "gathered"
        if name.endswith(".bias") and split is not None and split.bias != "split":
            kind = "replicated"
        counts[kind] += parameter.numel()
        total += parameter.numel()
    shares = {kind: count / max(1, total) for kind, count in counts.items()}
    return Coverage(**shares)


def _heads(plan: Plan, model: nn.Module, rank: int) -> int:
    """Query heads of the rank: by the region whose consumer divides into heads, else all of them."""
    for region in reversed(plan.regions):
        divisions = [count for count in region.divisions if count < region.width]
        if divisions:
            split = plan.params[region.consumer]
            return split.sizes[rank] * max(divisions) // region.width
    count = getattr(getattr(model, "config", None), "num_attention_heads", 0)
    return count if isinstance(count, int) else 0
