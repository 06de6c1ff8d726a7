"""The parameters of a plan: what regions say, and for everything else the safe way. Knows no data flow.

The rule for what is in no region: a linear is split by output features and gathered, an embedding is
split by rows and summed; both are right whatever the model does with the result. What holds less than
one part in a hundred of the model's parameters stays whole, for it would cost a collective and save
nothing; so does what code other than its own module uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.plan.glue import RawSlice
from shoal.plan.linears import input_dim, is_splittable, output_dim
from shoal.plan.probe import Call
from shoal.plan.regions import DraftRegion, ranges_of
from shoal.plan.types import BiasRule, Range, Split, even_ranges, pattern_of

__all__ = ["Inventory", "fallback_split", "parameter_splits", "take_inventory"]

SMALL_SHARE = 0.01  # of the model's parameters, below which nothing is gained by splitting


@dataclass(slots=True)
class Inventory:
    """The weights of the whole model, by pattern."""

    modules: dict[str, list[nn.Module]] = field(default_factory=dict)  # linears and embeddings
    shapes: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    ties: list[set[str]] = field(default_factory=list)  # patterns that share a parameter
    raw: dict[str, int] = field(default_factory=dict)  # other matrices and more: elements
    total: int = 0  # elements of all parameters, tied ones once

    def tied_to(self, pattern: str) -> set[str]:
        """Patterns of the weights that are the same parameter, itself included."""
        return set().union({pattern}, *(group for group in self.ties if pattern in group))


def take_inventory(model: nn.Module) -> Inventory:
    """List the weights of a model (on meta is enough)."""
    found = Inventory(total=sum(parameter.numel() for parameter in model.parameters()))
    by_parameter: dict[int, set[str]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{module_name}.{attribute}" if module_name else attribute
            pattern = pattern_of(name)
            if attribute == "weight" and is_splittable(module):
                found.modules.setdefault(pattern, []).append(module)
                found.shapes.setdefault(pattern, set()).add(tuple(parameter.shape))
                found.elements[pattern] = found.elements.get(pattern, 0) + parameter.numel()
                found.names.setdefault(pattern, []).append(name)
            elif parameter.dim() >= 2:
                found.raw[pattern] = found.raw.get(pattern, 0) + parameter.numel()
            by_parameter.setdefault(id(parameter), set()).add(pattern)
    found.ties = [group for group in by_parameter.values() if len(group) > 1]
    return found


def parameter_splits(
    inventory: Inventory,
    regions: Iterable[DraftRegion],
    raw: Iterable[RawSlice],
    calls: Sequence[Call],
    reasons: Mapping[str, str],
    tp: int,
) -> dict[str, Split]:
    """A split for every weight of the model.

    Args:
        inventory: of the whole model.
        regions: those that passed.
        raw: raw parameters cut along with them.
        calls: every recorded use of a weight.
        reasons: pattern -> why it is in no region, where that is known.
        tp: number of ranks.
    """
    splits: dict[str, Split] = {}
    for region in regions:
        splits |= _region_splits(region, inventory)
    for entry in raw:
        splits[entry.pattern] = Split(
            "column", entry.dim, entry.size, entry.ranges, "none", "belongs to heads"
        )
    foreign = {call.pattern for call in calls if call.kind == "raw"}
    for pattern in inventory.modules:
        if pattern not in splits:
            splits |= _safe_splits(pattern, inventory, foreign, splits, reasons.get(pattern, ""), tp)
    for pattern, elements in inventory.raw.items():
        if pattern not in splits and elements >= SMALL_SHARE * inventory.total:
            splits[pattern] = Split("replicate", reason="no linear or embedding module holds it")
    return splits


def _region_splits(region: DraftRegion, inventory: Inventory) -> dict[str, Split]:
    found: dict[str, Split] = {}
    for pattern, columns in region.columns.items():
        module = inventory.modules[pattern][0]
        bias: BiasRule = "once" if getattr(module, "bias", None) is not None else "none"
        found[pattern] = Split(
            "row",
            input_dim(module),
            region.widths[pattern],
            _ranges(columns),
            bias,
            "takes what its rank made",
        )
    for consumer in region.consumers:
        for pattern in consumer.whole & inventory.modules.keys():
            found[pattern] = Split("replicate", reason=f"every rank needs all of it to feed {region.name}")
    for pattern, rows in region.rows.items():
        module = inventory.modules[pattern][0]
        if all(len(part) == region.widths[pattern] for part in rows):
            found[pattern] = Split("replicate", reason=f"every rank needs all of it to feed {region.name}")
            continue
        bias = "split" if getattr(module, "bias", None) is not None else "none"
        reason = f"feeds {region.name}"
        if pattern in region.duplicated:
            reason += "; ranks share some of it"
        found[pattern] = Split(
            "column", output_dim(module), region.widths[pattern], _ranges(rows), bias, reason
        )
    return found


def _ranges(parts: Sequence[torch.Tensor]) -> tuple[tuple[Range, ...], ...]:
    return tuple(ranges_of(part) for part in parts)


def _safe_splits(
    pattern: str,
    inventory: Inventory,
    foreign: set[str],
    splits: Mapping[str, Split],
    reason: str,
    tp: int,
) -> dict[str, Split]:
    """The split of one pattern outside all regions; per name where layers differ in shape."""
    tied = inventory.tied_to(pattern)
    why = ""
    if tied & foreign:
        why = "code other than its own module uses it"
    elif tied & splits.keys() and any(
        splits[name].op not in ("gather", "vocab") for name in tied & splits.keys()
    ):
        why = "tied to a weight that is not split this way"
    elif tied - inventory.modules.keys():
        why = "tied to a parameter that is no linear or embedding"
    elif inventory.elements[pattern] < SMALL_SHARE * inventory.total:
        why = "small: splitting it would cost a collective and save nothing"
    if why:
        return {pattern: Split("replicate", reason="; ".join(part for part in (reason, why) if part))}
    if len(inventory.shapes[pattern]) == 1:
        return {pattern: fallback_split(inventory.modules[pattern][0], tp, reason)}
    pairs = zip(inventory.names[pattern], inventory.modules[pattern], strict=True)
    return {name: fallback_split(module, tp, reason) for name, module in pairs}


def fallback_split(module: nn.Module, tp: int, reason: str) -> Split:
    """Split a linear by outputs and gather, or an embedding by rows and sum."""
    is_embedding = isinstance(module, nn.Embedding)
    dim = input_dim(module) if is_embedding else output_dim(module)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    size = weight.shape[dim]
    if size < tp:
        return Split("replicate", reason=f"{size} are fewer than {tp} ranks")
    has_bias = getattr(module, "bias", None) is not None
    return Split(
        "vocab" if is_embedding else "gather",
        dim,
        size,
        even_ranges(size, tp),
        "split" if has_bias else "none",
        reason or ("rows of a table" if is_embedding else "its outputs are needed whole"),
    )
