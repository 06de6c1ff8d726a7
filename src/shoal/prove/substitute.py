"""A plan with the widths of another model of the same structure. Knows no numbers but widths.

Every border is scaled by the ratio of the widths, exactly; where it does not fall on a whole feature the
plans are not the same plan, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.cones import Cone, Flow
from shoal.plan.features import Features
from shoal.plan.regions import ranges_of
from shoal.plan.slices import direct_tensors
from shoal.plan.types import Patch, Plan, Reshape, Split, even_ranges, pattern_of

__all__ = ["RegionMismatchError", "check_structure", "substitute"]


class RegionMismatchError(PlanError):
    """A region of the plan is not the same in the small model.

    Args:
        message: what differs.
        place: the region's consumer, or the module in which something differs (a pattern).
    """

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def substitute(plan: Plan, small: nn.Module) -> Plan:
    """``plan`` with the widths of ``small``.

    Raises:
        RegionMismatchError: a border or an integer of a region does not scale to a whole number.
        PlanError: the small model lacks something that the plan speaks of.
    """
    shapes = _shapes(small)
    owners = _owners(plan)
    params = {
        pattern: _scaled_split(pattern, split, shapes, owners.get(pattern, ""), plan.tp)
        for pattern, split in plan.params.items()
    }
    patches = tuple(_scaled_patch(patch, small) for patch in plan.patches)
    reshapes = tuple(_scaled_reshape(entry, plan, params) for entry in plan.reshapes)
    regions = tuple(region for region in plan.regions if region.consumer in shapes)  # not of layers cut off
    return replace(plan, params=params, patches=patches, reshapes=reshapes, regions=regions, kv=())


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module, attribute in direct_tensors(model):
        shape = tuple(getattr(module, attribute).shape)
        shapes[name] = shape
        shapes.setdefault(pattern_of(name), shape)
    return shapes


def _owners(plan: Plan) -> dict[str, str]:
    """Pattern -> consumer of the region it belongs to."""
    owners: dict[str, str] = {}
    for region in plan.regions:
        for pattern in (region.consumer, *region.producers):
            owners[pattern] = region.consumer
    return owners


def _scaled_split(
    pattern: str, split: Split, shapes: Mapping[str, tuple[int, ...]], consumer: str, tp: int
) -> Split:
    if not split.is_split:
        return split
    if pattern not in shapes:
        if not any(character == "*" for character in pattern):
            return replace(split, op="replicate", ranges=(), size=0)  # a layer that was cut off
        raise PlanError(f"the small model has no {pattern}")
    size = shapes[pattern][split.dim]
    if split.op in ("gather", "vocab"):
        if split.ranges != even_ranges(split.size, tp):  # what is proved must be what the plan says
            raise PlanError(f"{pattern}: {split.ranges} are no even parts of {split.size}")
        return replace(split, size=size, ranges=even_ranges(size, tp))
    ranges = tuple(
        tuple(
            (
                _scaled(start, size, split.size, pattern, consumer),
                _scaled(stop, size, split.size, pattern, consumer),
            )
            for start, stop in part
        )
        for part in split.ranges
    )
    return replace(split, size=size, ranges=ranges)


def _scaled(value: int, size: int, full: int, what: str, consumer: str) -> int:
    scaled, rest = divmod(value * size, full)
    if rest:
        raise RegionMismatchError(f"{what}: {value} of {full} is no whole number of {size}", consumer)
    return scaled


def _scaled_patch(patch: Patch, small: nn.Module) -> Patch:
    """The patch with the small model's value in place of the old one, and the same proportions.

    Where layers differ, a value that the small model has as it was is the one that is meant.
    """
    found: list[int] = []
    for name, module in small.named_modules():
        if pattern_of(name) != patch.module or type(module).__name__ != patch.class_name:
            continue
        attribute = patch.attribute.removeprefix("config.")
        holder: Any = module.config if attribute != patch.attribute else module
        old = getattr(holder, attribute, None)
        if isinstance(old, int):
            found.append(old)
    if not found:
        raise PlanError(f"the small model has no {patch.class_name} at {patch.module}")
    old = patch.old if patch.old in found else found[0]
    what = f"{patch.class_name}.{patch.attribute}"
    values = tuple(_scaled(value, old, patch.old, what, patch.module) for value in patch.values)
    return replace(patch, old=old, values=values)


def _scaled_reshape(entry: Reshape, plan: Plan, params: Mapping[str, Split]) -> Reshape:
    """The reshape with the small model's width of the consumer that it was made for."""
    for region in plan.regions:
        is_inside = region.consumer.startswith(f"{entry.module}.")
        if is_inside and (region.width, plan.params[region.consumer].sizes) == (entry.old, entry.values):
            split = params[region.consumer]
            return replace(entry, old=split.size, values=split.sizes)
    raise PlanError(f"no region of the plan explains the reshape to {entry.old} in {entry.module}")


def check_structure(plan: Plan, flow: Flow) -> None:
    """Hold a plan against the data flow that was measured on the model it is for.

    For every region: the rows that a rank's columns depend on, as measured, must be among the rows that
    the plan gives the rank.

    Raises:
        RegionMismatchError: they are not.
    """
    consumers = {consumer.call.pattern: consumer for consumer in flow.consumers}
    own = [consumers[region.consumer] for region in plan.regions if region.consumer in consumers]
    for region in plan.regions:
        consumer = consumers.get(region.consumer)
        if consumer is None:
            raise RegionMismatchError(
                f"{region.consumer} cannot be split in the small model", region.consumer
            )
        for name, cone in consumer.cones.items():
            producer = plan.params.get(name)
            if producer is None or not producer.is_split:
                continue
            known = [other.cones[name].reaches for other in own if name in other.cones]
            uses = [call.output_features for call in consumer.upstream if call.pattern == name]
            for rank in range(plan.tp):
                columns = _features(consumer.call.input_features, plan.params[region.consumer], rank)
                needed = _needed(cone, columns, torch.stack(known).any(0))
                held = [_features(use, producer, rank) for use in uses]
                if not all(bool(torch.isin(needed, part).all()) for part in held):
                    message = f"{name} does not feed {region.consumer} as the plan says"
                    raise RegionMismatchError(message, region.consumer)


def _features(features: Features | None, split: Split, rank: int) -> torch.Tensor:
    """The features that lie in the rank's part of the parameter; none where they lie across it."""
    place = features.places.get(split.dim) if features is not None else None
    if place is None:
        return torch.zeros(0, dtype=torch.long)
    held = torch.zeros(split.size, dtype=torch.bool)
    for start, stop in split.ranges[rank]:
        held[start:stop] = True
    return torch.nonzero(held[place]).flatten()


def _needed(cone: Cone, columns: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Rows that reach the columns, and those that reach nothing in any consumer."""
    rows = [cone.rows(start, stop) for start, stop in ranges_of(columns)]
    if not rows:
        return torch.zeros(0, dtype=torch.long)
    found: torch.Tensor = torch.unique(torch.cat(rows))
    is_needed: torch.Tensor = cone.reaches[found] | ~known[found]
    return found[is_needed]
