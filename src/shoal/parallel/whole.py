"""Which modules of a sharded model still give what they gave before when called on their own. Decides by the
plan's regions; runs nothing.

A module is whole if it holds all of a region (producers, consumer, the sum over ranks) or nothing of it. One
that holds some of it takes or gives one rank's features only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from shoal.plan.types import Plan, pattern_of

__all__ = ["partial_modules"]


@dataclass(frozen=True, slots=True)
class _Unit:
    """One region in one layer: what belongs together, by full parameter name, and where its sum is done."""

    names: frozenset[str]
    home: str  # the smallest module that holds it all


def partial_modules(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Modules that hold a part of a region only: name -> the smallest module around that is whole."""
    units = list(_units(model, plan))
    found: dict[str, str] = {}
    for name, _ in model.named_modules():
        for unit in units:
            if name and _holds(name, unit.names) and not _is_within(unit.home, name):
                found[name] = _common(found[name], unit.home) if name in found else unit.home
    for name in found:
        while found[name] in found:  # the home of one region may hold a part of another
            found[name] = found[found[name]]
    return found


def _units(model: nn.Module, plan: Plan) -> Iterator[_Unit]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(pattern_of(name), []).append(name)
    modules = [name for name, _ in model.named_modules()]
    for patterns in _groups(plan):
        found = {name for pattern in patterns for name in by_pattern.get(pattern, ())}
        depth = min((pattern.count("*") for pattern in patterns), default=0)
        layers: dict[tuple[str, ...], set[str]] = {}
        for name in found:
            layers.setdefault(_numbers(name)[:depth], set()).add(name)
        for together in layers.values():
            yield _Unit(frozenset(together), _sum_home(together, plan, modules))


def _groups(plan: Plan) -> Iterator[set[str]]:
    """Patterns that are split together: regions, with the raw parameters that lie beside them."""
    owned = {name for region in plan.regions for name in (region.consumer, *region.producers)}
    raw = [name for name, split in plan.params.items() if split.op == "column" and name not in owned]
    groups = [{region.consumer, *region.producers} for region in plan.regions]
    for name in raw:
        if groups:
            max(groups, key=lambda group: max(len(_common(name, other)) for other in group)).add(name)
    yield from groups


def _sum_home(names: Iterable[str], plan: Plan, modules: Iterable[str]) -> str:
    """The smallest module that holds all of ``names`` and the place where their results are summed."""
    names = list(names)
    home = names[0].rpartition(".")[0] if len(names) == 1 else _common(*names)
    patterns = {pattern_of(name) for name in names} | set(names)
    for reduction in plan.reductions:
        if patterns & set(reduction.weights):
            around = [
                module
                for module in modules
                if pattern_of(module) == reduction.module and any(_is_within(name, module) for name in names)
            ]
            home = _common(home, *around) if around else home
    return home


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part.isdigit())


def _common(*names: str) -> str:
    """The path that all names begin with."""
    shared: list[str] = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _is_within(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _holds(module: str, names: Iterable[str]) -> bool:
    return any(_is_within(name, module) for name in names)


def advice(partial: Mapping[str, str], name: str) -> str:
    """What to call instead of a partial module."""
    home = partial[name]
    return f"call {home} around it" if home else "call the model"
