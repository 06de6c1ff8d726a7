"""The parameters of a plan: what regions say, and for everything else the safe way. Knows no data flow.

The rule for what is in no region: a linear is split by output features and gathered, an embedding is
split by rows and summed; both are right whatever the model does with the result, as long as the module is
only called. What is so little of the model that the copies on all ranks make up less than one part in a
hundred of it stays whole, for it would cost a collective and save nothing; so does what code other than its
own module uses, what no run of the model used, and tables that grow.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.plan.glue import RawSlice
from shoal.plan.linears import input_dim, is_splittable, output_dim
from shoal.plan.naming import Naming
from shoal.plan.probe import Call
from shoal.plan.regions import DraftRegion, ranges_of
from shoal.plan.types import BiasRule, Range, Split, even_ranges

__all__ = ["Inventory", "fallback_split", "parameter_splits", "take_inventory"]

SMALL_SHARE = (
    0.01  # of the model's parameters: copies of one weight below which nothing is gained by splitting
)
SMALL_SHARES = 0.02  # the same, of all such weights together


@dataclass(slots=True)
class Inventory:
    """The weights of the whole model, by pattern."""

    modules: dict[str, list[nn.Module]] = field(default_factory=dict)  # linears and embeddings
    shapes: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)  # of every matrix and more
    elements: dict[str, int] = field(default_factory=dict)  # of every matrix and more
    names: dict[str, list[str]] = field(default_factory=dict)
    ties: list[set[str]] = field(default_factory=list)  # patterns that share a parameter
    raw: dict[str, int] = field(default_factory=dict)  # matrices and more of no linear: elements
    total: int = 0  # elements of all parameters, tied ones once

    def tied_to(self, pattern: str) -> set[str]:
        """Patterns of the weights that are the same parameter, itself included."""
        return set().union({pattern}, *(group for group in self.ties if pattern in group))


def take_inventory(model: nn.Module, naming: Naming | None = None) -> Inventory:
    """List the weights of a model (on meta is enough), by pattern or as they are called."""
    naming = naming or Naming()
    found = Inventory(total=sum(parameter.numel() for parameter in model.parameters()))
    by_parameter: dict[int, set[str]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{module_name}.{attribute}" if module_name else attribute
            pattern = naming.key_of(name)
            is_weight = attribute == "weight" and is_splittable(module)
            if is_weight or parameter.dim() >= 2:
                found.shapes.setdefault(pattern, set()).add(tuple(parameter.shape))
                found.elements[pattern] = found.elements.get(pattern, 0) + parameter.numel()
                found.names.setdefault(pattern, []).append(name)
            if is_weight:
                found.modules.setdefault(pattern, []).append(module)
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
    regions = list(regions)
    for region in regions:
        splits |= _region_splits(region, inventory)
    for region in regions:
        for pattern in {name for consumer in region.consumers for name in consumer.whole}:
            if pattern in inventory.elements and pattern not in splits and not _is_table(pattern, inventory):
                splits[pattern] = _needed_whole(region)
    for entry in raw:
        splits[entry.pattern] = Split(
            "column", entry.dim, entry.size, entry.ranges, "none", "belongs to heads"
        )
    foreign = {call.pattern for call in calls if call.kind in ("product", "raw")}
    unused = _unused(inventory, calls)
    small = _small(inventory, inventory.modules.keys() - splits.keys(), tp)
    for pattern in inventory.modules:
        if pattern not in splits:
            reason = reasons.get(pattern, "")
            splits |= _safe_splits(pattern, inventory, foreign, unused, small, splits, reason, tp)
    for pattern, elements in inventory.raw.items():
        if pattern not in splits and elements >= SMALL_SHARE * inventory.total:
            splits[pattern] = Split("replicate", reason=reasons.get(pattern) or _why_whole(pattern, calls))
    return splits


def _region_splits(region: DraftRegion, inventory: Inventory) -> dict[str, Split]:
    found: dict[str, Split] = {}
    for pattern in region.columns:
        bias: BiasRule = "once" if _has_bias(pattern, inventory) else "none"
        slab = region.slabs[pattern]
        found[pattern] = Split(
            "row", slab.dim, slab.size, _ranges(slab.parts), bias, "takes what its rank made"
        )
    for pattern, rows in region.rows.items():
        if all(len(part) == region.widths[pattern] for part in rows):
            found[pattern] = _needed_whole(region)
            continue
        bias = "split" if _has_bias(pattern, inventory) else "none"
        reason = f"feeds {region.name}"
        if pattern in region.duplicated:
            reason += "; ranks share some of it"
        slab = region.slabs[pattern]
        found[pattern] = Split("column", slab.dim, slab.size, _ranges(slab.parts), bias, reason)
    return found


def _needed_whole(region: DraftRegion) -> Split:
    return Split("replicate", reason=f"every rank needs all of it to feed {region.name}")


def _is_table(pattern: str, inventory: Inventory) -> bool:
    """Whether it is an embedding's, whose rows are whole though ranks hold some of them each."""
    return any(isinstance(module, nn.Embedding) for module in inventory.modules.get(pattern, ()))


def _has_bias(pattern: str, inventory: Inventory) -> bool:
    """Whether a linear or an embedding adds a bias that belongs to the weight."""
    modules = inventory.modules.get(pattern)
    return modules is not None and getattr(modules[0], "bias", None) is not None


def _why_whole(pattern: str, calls: Sequence[Call]) -> str:
    """Why a raw parameter is in no region, by what the recordings did with it."""
    own = [call for call in calls if call.pattern == pattern]
    others = sorted({call.function for call in own if call.kind == "raw"} - {""})
    if others:
        return f"its own code uses it in {', '.join(others)}, which is no plain product"
    if not own:
        return "its own code multiplies it by no features, or no recording used it"
    functions = ", ".join(sorted({call.function for call in own}))
    return f"what its own code gives to {functions} and takes from it is needed whole"


def _ranges(parts: Sequence[torch.Tensor]) -> tuple[tuple[Range, ...], ...]:
    return tuple(ranges_of(part) for part in parts)


def _small(inventory: Inventory, patterns: Iterable[str], tp: int) -> set[str]:
    """The least of these weights, as many as ranks may all hold without being out of balance."""
    found: set[str] = set()
    copies = 0
    for pattern in sorted(patterns, key=lambda name: (inventory.elements[name], name)):
        more = inventory.elements[pattern] * (tp - 1)
        if more >= SMALL_SHARE * inventory.total or copies + more > SMALL_SHARES * inventory.total:
            break
        found.add(pattern)
        copies += more
    return {pattern for pattern in found if inventory.tied_to(pattern) <= found}  # tied ones together


def _unused(inventory: Inventory, calls: Sequence[Call]) -> set[str]:
    """Weights that no recording used, of a model that was recorded: whether they are only called, as a
    gathered one must be, or read by code of its own, is not known.
    """
    used = {call.pattern for call in calls}
    return {name for name in inventory.modules if used and not inventory.tied_to(name) & used}


def _safe_splits(
    pattern: str,
    inventory: Inventory,
    foreign: set[str],
    unused: set[str],
    small: set[str],
    splits: Mapping[str, Split],
    reason: str,
    tp: int,
) -> dict[str, Split]:
    """The split of one pattern outside all regions; per name where layers differ in shape."""
    tied = inventory.tied_to(pattern)
    why = ""
    if tied & foreign:
        why = "code other than its own module uses it"
    elif pattern in unused:
        why = "no run of the model used it"
    elif tied & splits.keys() and any(
        splits[name].op not in ("gather", "vocab") for name in tied & splits.keys()
    ):
        why = "tied to a weight that is not split this way"
    elif tied - inventory.modules.keys():
        why = "tied to a parameter that is no linear or embedding"
    elif any(_resizes_itself(type(module)) for module in inventory.modules[pattern]):
        why = "its own code makes it anew where it is too short"
    elif pattern in small:
        why = "small: splitting it would cost a collective and save nothing"
    if why:
        return {pattern: Split("replicate", reason="; ".join(part for part in (reason, why) if part))}
    if len(inventory.shapes[pattern]) == 1:
        return {pattern: fallback_split(inventory.modules[pattern][0], tp, reason)}
    pairs = zip(inventory.names[pattern], inventory.modules[pattern], strict=True)
    return {name: fallback_split(module, tp, reason) for name, module in pairs}


def _resizes_itself(kind: type[nn.Module]) -> bool:
    """Whether a module's class assigns its weight after it was made, as tables of positions do that grow with
    the longest input: rows of such a table on a rank would look to it like a table that is too short.
    """
    own = [base for base in kind.__mro__ if not base.__module__.startswith("torch.") and base is not object]
    functions = [
        function
        for base in own
        for name, function in vars(base).items()
        if inspect.isfunction(function) and name != "__init__"
    ]
    return any(
        step.opname == "STORE_ATTR" and step.argval == "weight"
        for function in functions
        for step in dis.get_instructions(function)
    )


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
