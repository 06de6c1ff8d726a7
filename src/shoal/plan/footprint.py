"""What a plan costs each rank, by arithmetic on shapes. Knows no device and measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shoal.plan.reductions import reducing_modules
from shoal.plan.slices import direct_tensors, slices
from shoal.plan.types import Plan, pattern_of

__all__ = ["Collectives", "Coverage", "Footprint", "RankFootprint", "count_collectives", "footprint"]


@dataclass(frozen=True, slots=True)
class RankFootprint:
    """What one rank holds."""

    rank: int
    weight_bytes: int  # parameters and buffers, tied ones once
    kv_bytes_per_token: int | None  # keys and values, all layers; None where unknown
    heads: int | None  # query heads; None where unknown
    kv_heads: int | None  # the most in any layer, 0 where there is no KV cache; None where unknown


@dataclass(frozen=True, slots=True)
class Coverage:
    """Shares of the bytes of the model's parameters, tied ones once, adding up to 1."""

    column_row: float  # split without any exchange between producer and consumer
    gathered: float  # split, with outputs gathered or summed right away
    replicated: float  # whole on every rank


@dataclass(frozen=True, slots=True)
class Collectives:
    """Exchanges among ranks in one forward; for a decoder, a forward gives every sequence a token."""

    all_reduces: int
    all_gathers: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """The whole plan's cost."""

    ranks: tuple[RankFootprint, ...]
    coverage: Coverage
    vocabulary: float  # share of the parameters' bytes in what has a row a token id; it is in coverage, too
    all_reduces: int  # per forward
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
            None if per_token is None else per_token * kv_bytes,
            _heads(plan, model, rank),
            None if per_token is None else max((entry.heads[rank] for entry in plan.kv), default=0),
        )
        for rank in range(plan.tp)
        for per_token in (_kv_elements(plan, rank),)
    )
    counts = _recorded(plan) or count_collectives(plan, model, {})
    return Footprint(
        ranks, _coverage(plan, model), _vocabulary(model), counts.all_reduces, counts.all_gathers
    )


def _kv_elements(plan: Plan, rank: int) -> int | None:
    """What the rank's cache takes for a token; None where nobody knows what the model keeps."""
    if not plan.kv and not str(plan.evidence.get("kv_cache", "")).startswith("none"):
        return None
    return sum(entry.num_layers * entry.heads[rank] * (entry.key_dim + entry.value_dim) for entry in plan.kv)


def _recorded(plan: Plan) -> Collectives | None:
    """What was counted when the plan was made, with the model at hand to count how often modules run."""
    reduces, gathers = plan.evidence.get("all_reduces"), plan.evidence.get("all_gathers")
    return Collectives(reduces, gathers) if type(reduces) is int and type(gathers) is int else None


def count_collectives(plan: Plan, model: nn.Module, uses: Mapping[str, int]) -> Collectives:
    """Collectives of one forward.

    Args:
        plan: made for the model.
        model: the whole model; meta is enough.
        uses: weight pattern -> how often each of its weights is used in a forward; 1 where it is silent.
    """
    late = {name for reduction in plan.reductions for name in reduction.weights}
    dealt: set[int] = set()  # modules with stacks of experts, which sum once for all of them
    reduces = gathers = 0
    for name, module, attribute in direct_tensors(model):
        split = plan.split_of(name) if attribute in module._parameters else None
        pattern = pattern_of(name)
        if split is None or late & {name, pattern}:
            continue
        reduces += uses.get(pattern, 1) * (split.op in ("row", "vocab"))
        if split.op == "experts":
            dealt.add(id(module))
        gathers += uses.get(pattern, 1) * (split.op == "gather")
    reduces += len(dealt) + sum(1 for _ in reducing_modules(model, plan.reductions))
    return Collectives(reduces, gathers)


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
    for name, parameter in model.named_parameters():
        counts[_kind(plan, name)] += parameter.numel()
    total = max(1, sum(counts.values()))
    return Coverage(**{kind: count / total for kind, count in counts.items()})


def _kind(plan: Plan, name: str) -> str:
    """How a parameter is split, as coverage has it. A bias goes with its linear."""
    split = plan.split_of(name)
    if split is None and name.endswith(".bias"):
        weight = plan.split_of(f"{name.removesuffix('bias')}weight")
        split = weight if weight is not None and weight.bias == "split" else None
    if split is None or not split.is_split:
        return "replicated"
    return "gathered" if split.op in ("gather", "vocab") else "column_row"


def _vocabulary(model: nn.Module) -> float:
    """Share of the parameters in embeddings of the vocabulary, and in heads over it."""
    sizes = {
        getattr(getattr(model, "config", None), name, None) for name in ("vocab_size", "src_vocab_size")
    } - {None}
    total = inside = 0
    for _, parameter in model.named_parameters():
        total += parameter.numel()
        inside += parameter.numel() * (parameter.dim() == 2 and parameter.shape[0] in sizes)
    return inside / max(1, total)


def _heads(plan: Plan, model: nn.Module, rank: int) -> int | None:
    """Query heads of the rank: by the region whose consumer divides into heads, else all of them."""
    count = getattr(getattr(model, "config", None), "num_attention_heads", None)
    count = count if type(count) is int and count > 0 else None
    divided = [
        (max(divisions), region)
        for region in plan.regions
        if (divisions := [number for number in region.divisions if number < region.width])
    ]
    fitting = [entry for entry in divided if entry[0] == count]  # KV groups too, each with as many heads
    fitting += [entry for entry in divided if count is None or count % entry[0] == 0]
    if not fitting:
        return count
    number, region = fitting[0]
    split = plan.params[region.consumer]
    heads, rest = divmod(split.sizes[rank] * (count or number), split.size)
    return None if rest else heads
