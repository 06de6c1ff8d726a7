"""Which part of a plan is wrong, when its proof fails: every part is tried with the rest whole. Runs
nothing itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from shoal.errors import PlanError
from shoal.plan.asked import is_asked
from shoal.plan.reductions import consistent
from shoal.plan.types import Plan, Region, Split, pattern_of
from shoal.prove.substitute import RegionMismatchError

__all__ = ["Guilty", "find_guilty", "keep_pattern", "keep_regions"]


@dataclass(frozen=True, slots=True)
class Guilty:
    """Regions (consumers) to gather, and patterns to replicate."""

    regions: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()

    @property
    def found(self) -> bool:
        return bool(self.regions or self.patterns)


def find_guilty(plan: Plan, error: PlanError, can_run: bool, holds: Callable[[Plan], bool]) -> Guilty:
    """Which regions fail on their own; if none do, which of the other patterns; if none, all regions.

    Every plan has something guilty, or nothing split: the search for a provable plan ends.
    """
    consumers = frozenset(region.consumer for region in plan.regions)
    if isinstance(error, RegionMismatchError):
        hit = frozenset(
            name for name in consumers if error.place == name or pattern_of(name).startswith(error.place)
        )
        return Guilty(hit or consumers)
    if not can_run:
        return Guilty(consumers)
    regions = frozenset(name for name in consumers if not holds(keep_regions(plan, [name])))
    if regions:
        return Guilty(regions)
    owned = {name for region in plan.regions for name in (region.consumer, *region.producers)}
    others = frozenset(name for name, split in plan.params.items() if split.is_split and name not in owned)
    patterns = frozenset(name for name in others if not holds(keep_pattern(plan, name)))
    if patterns:
        return Guilty(patterns=patterns)
    return Guilty(consumers) if consumers else Guilty(patterns=others)


def keep_regions(plan: Plan, consumers: Iterable[str]) -> Plan:
    """``plan`` with only these regions split, with what belongs to them and those that share their producers;
    all other weights whole."""
    wanted = set(consumers)
    shared = {name for region in plan.regions if region.consumer in wanted for name in region.producers}
    kept = tuple(
        region for region in plan.regions if region.consumer in wanted or shared & set(region.producers)
    )
    names = {name for region in kept for name in (region.consumer, *region.producers)}
    owned = {name for region in plan.regions for name in (region.consumer, *region.producers)}
    homes = {_home(region) for region in plan.regions}
    kept_homes = {_home(region) for region in kept}

    def belongs(module: str) -> bool:
        """Whether the innermost home around a module is that of a kept region."""
        return max((home for home in homes if _is_within(module, home)), key=len, default="") in kept_homes

    params = {
        name: split
        if name in names or (name not in owned and _is_attached(split) and belongs(pattern_of(name)))
        else _WHOLE
        for name, split in plan.params.items()
    }
    return consistent(
        replace(
            plan,
            params=params,
            regions=kept,
            patches=tuple(patch for patch in plan.patches if belongs(patch.module)),
            args=tuple(argument for argument in plan.args if belongs(argument.module)),
            reshapes=tuple(entry for entry in plan.reshapes if belongs(entry.module)),
        )
    )


def _is_attached(split: Split) -> bool:
    """Whether a split follows from a region's, though it is none of its weights'."""
    return split.op in ("column", "once") and not is_asked(split)


def _home(region: Region) -> str:
    """Pattern of the innermost module that contains the region's weights."""
    paths = [name.split(".")[:-2] for name in (region.consumer, *region.producers)]
    common = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return pattern_of(".".join(parts[0] for parts in common))


def _is_within(module: str, home: str) -> bool:
    return module == home or module.startswith(f"{home}." if home else "")


def keep_pattern(plan: Plan, pattern: str) -> Plan:
    """``plan`` with only one pattern outside the regions split, and what is tied to it."""
    params = {
        name: split if name == pattern or _same_cut(split, plan.params[pattern]) else _WHOLE
        for name, split in plan.params.items()
    }
    return replace(plan, params=params, regions=(), patches=(), args=(), reshapes=(), reductions=())


def _same_cut(split: Split, other: Split) -> bool:
    """Tied weights are cut alike, and only together."""
    return split.op in ("gather", "vocab") and (split.dim, split.size, split.ranges) == (
        other.dim,
        other.size,
        other.ranges,
    )


_WHOLE = Split("replicate", reason="left out")
