"""Where the results of row-split weights are summed over ranks: late, once for a whole block, if that gives
the same. Knows no search for what is split.

A module qualifies if its output is linear in the results of the row-split weights in it. That is measured
by replaying: the recorded results are replaced by random parts that add up to them, one rank's at a time,
and the module's outputs must add up as well (:mod:`shoal.plan.parts`). Terms that the module adds itself (a
bias) would be added by every rank; they are kept by rank 0 only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shoal.plan.glue import Glue
from shoal.plan.parts import Frame, NotLinearError, PartReplay, Sources
from shoal.plan.types import Plan, Reduction, Split, pattern_of

__all__ = ["LateSums", "consistent", "find_reductions", "reducing_modules"]


@dataclass(frozen=True, slots=True)
class LateSums:
    """Sums that are done late, and the raw parameters (patterns) that only rank 0 adds for them."""

    reductions: tuple[Reduction, ...] = ()
    once: frozenset[str] = frozenset()

    def splits(self) -> dict[str, Split]:
        """The splits of those parameters."""
        return {name: Split("once", reason="added before the sum over ranks") for name in self.once}


def find_reductions(
    glue: Glue, weights: Collection[str], split: Collection[str] = (), given: Sequence[Reduction] = ()
) -> LateSums:
    """Blocks in which several row-split results, or one several times, can be summed over ranks once.

    The innermost module with the fewest sums is taken. A model with one row-split weight a block, used
    once, needs none.

    Args:
        glue: the probe model and its recordings.
        weights: patterns of the row-split weights whose results are summed.
        split: patterns of which ranks hold parts: no terms that rank 0 could add.
        given: reductions that are settled; they may be merged into one further out.
    """
    sources = Sources(frozenset(weights), tuple(given))
    finder = _Finder(PartReplay(glue, sources, frozenset(split) | sources.weights), sources)
    return finder.find(glue.model)


@dataclass(slots=True)
class _Finder:
    """One search, from the innermost modules outwards."""

    replay: PartReplay
    sources: Sources

    def find(self, model: nn.Module) -> LateSums:
        candidates = _candidates(model, self.sources)
        if not candidates:
            return LateSums(self.sources.given)
        accepted = {entry.module: LateSums((entry,)) for entry in self.sources.given}
        try:
            uses = self.replay.uses(candidates)
        except Exception:  # a model that cannot be repeated as it is, whatever it raises, says nothing
            return LateSums(self.sources.given)
        failed: set[str] = set()
        for module in sorted(candidates, key=lambda name: -name.count(".")):
            if any(_is_inside(other, module) for other in failed) or _num_sums(uses, module, accepted) < 2:
                continue
            found = self._checked(module)
            if found is None:
                failed.add(module)
                continue
            accepted = {name: sums for name, sums in accepted.items() if not _is_inside(name, module)}
            accepted[module] = found
        return LateSums(
            tuple(entry for sums in accepted.values() for entry in sums.reductions),
            frozenset().union(*(sums.once for sums in accepted.values())),
        )

    def _checked(self, module: str) -> LateSums | None:
        """The reduction in that module's output, if it gives what summing each result would."""
        inside = {name for name in self.sources.weights if _is_inside(pattern_of(name), module)}
        inside |= {
            name for entry in self.sources.given if _is_inside(entry.module, module) for name in entry.weights
        }
        once: frozenset[str] = frozenset()
        output, reason = self.replay.output_of_sum(module, once)
        if output is None and reason is NotLinearError:
            once = self.replay.terms(module)
            output, _ = self.replay.output_of_sum(module, once) if once else (None, None)
        return None if output is None else LateSums((Reduction(module, output, tuple(sorted(inside))),), once)


def _candidates(model: nn.Module, sources: Sources) -> set[str]:
    """Patterns of modules that hold all the instances of some sources."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in model.named_modules()]
    places = [name for name in names if {name, pattern_of(name)} & sources.weights]
    places += [name for name in modules if pattern_of(name) in {entry.module for entry in sources.given}]
    total: dict[str, int] = {}  # per pattern of a source, how many there are
    around: dict[str, dict[str, int]] = {}  # per pattern of a module, how many of those it holds
    for place in places:
        pattern, parts = pattern_of(place), place.split(".")
        total[pattern] = total.get(pattern, 0) + 1
        for length in range(1, len(parts)):
            held = around.setdefault(pattern_of(".".join(parts[:length])), {})
            held[pattern] = held.get(pattern, 0) + 1
    return {
        module
        for module, held in around.items()
        if all(count == total[pattern] for pattern, count in held.items())
    }


def _num_sums(uses: Sequence[frozenset[Frame]], module: str, accepted: Mapping[str, LateSums]) -> int:
    """The most sums over ranks in one call of the module, with what has been accepted."""
    sums: dict[Frame, set[object]] = {}
    for number, frames in enumerate(uses):
        inner = sorted(
            (frame for frame in frames if frame.pattern in accepted), key=lambda frame: frame.name.count(".")
        )
        for frame in frames:
            if frame.pattern == module:
                summed = next((other for other in inner if _is_inside(other.pattern, module)), None)
                sums.setdefault(frame, set()).add(number if summed is None else summed)
    return max((len(units) for units in sums.values()), default=0)


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def reducing_modules(
    model: nn.Module, reductions: Sequence[Reduction]
) -> Iterator[tuple[nn.Module, Reduction, frozenset[str]]]:
    """(module, reduction, full names of the reduction's weights in it) for every module that sums.

    A module whose name matches, but that holds none of the weights, sums nothing: layers of another kind
    may have one of that name.
    """
    modules = dict(model.named_modules())
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for reduction in reductions:
        summing = {name for name in modules if pattern_of(name) == reduction.module}
        held: dict[str, set[str]] = {}
        for name in names:
            if not {name, pattern_of(name)} & set(reduction.weights):
                continue
            parts = name.split(".")
            for length in range(1, len(parts)):
                around = ".".join(parts[:length])
                if around in summing:
                    held.setdefault(around, set()).add(name)
        for around, weights in held.items():
            yield modules[around], reduction, frozenset(weights)


def consistent(plan: Plan) -> Plan:
    """``plan`` without the reductions of which a weight no longer gives partial results.

    Its other weights are summed where they are used, then, and what only rank 0 added is whole again.
    """
    dropped = [
        entry
        for entry in plan.reductions
        if any(
            name not in plan.params or plan.params[name].op not in ("row", "experts")
            for name in entry.weights
        )
    ]
    if not dropped:
        return plan
    params = {
        name: Split("replicate", reason="left out")
        if split.op == "once" and any(_is_inside(name, entry.module) for entry in dropped)
        else split
        for name, split in plan.params.items()
    }
    return replace(
        plan, params=params, reductions=tuple(entry for entry in plan.reductions if entry not in dropped)
    )
