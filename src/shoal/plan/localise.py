"""Finds what a region needs changed on a rank besides its weights: integers in the module's code,
arguments, raw parameters. Knows no attribute names; every finding is one that passed the glue check.

Which arguments and raw parameters depend on the rank is measured, by the gradients of the rank's
columns. Integers are searched for: only those that the failing run had used in a tensor operation are
suspects, and only values in a proportion that occurs in the region. Every single change is tried before
two together; what brought the code furthest is changed further.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from shoal.plan.glue import Glue, Local, RawSlice, Verdict
from shoal.plan.linears import is_splittable
from shoal.plan.probe import Call, Recording
from shoal.plan.regions import DraftRegion, ranges_of
from shoal.plan.repair import repaired_sizes
from shoal.plan.types import ArgumentSlice, Range, Reshape, pattern_of, total

__all__ = ["MAX_CHECKS", "localise"]

MAX_CHECKS = 150  # glue checks per region before it is given up
_MAX_CHANGES = 4  # integers changed together

Shares = tuple[Fraction, ...]  # one a rank


def localise(glue: Glue, accepted: Local, region: DraftRegion, tp: int) -> Local | None:
    """What makes the code rank-local with ``region`` split as well, or None.

    Args:
        glue: the probe model and its recordings; the first is the one the region was measured on.
        accepted: regions that have passed, with their changes.
        region: the candidate; ``reason`` is set when None is returned.
        tp: number of ranks.
    """
    search = _Search(glue, region, tp, _proportions(region, tp))
    budget = glue.num_checks + MAX_CHECKS
    found = search.run(_starts(glue, accepted, region, tp), budget)
    if found is None:
        spent = f" in {MAX_CHECKS} checks" if glue.num_checks > budget else ""
        region.reason = f"its code does not become rank-local{spent}: {search.error}"
    return found


def _starts(glue: Glue, accepted: Local, region: DraftRegion, tp: int) -> list[Local]:
    """What the search begins with: what was measured to be cut, in two variants where there are arguments."""
    args, raw = _measured_slices(glue, region, tp)
    start = replace(accepted.plus(region), raw=[*accepted.raw, *raw])
    variants = [replace(start, args=[*start.args, *args])] if args else []
    variants.append(start)  # an argument may come from a part of the same region: cut already
    return variants


def _telling_ranks(local: Local, tp: int) -> list[int]:
    """One rank of every size of its part of the region that was added last, and the last rank: ranks whose
    parts are of one size run the same code.
    """
    region = local.regions[-1]
    first: dict[tuple[int, ...], int] = {}
    for rank in range(tp):
        sizes = [len(parts[rank]) for parts in (*region.columns.values(), *region.rows.values())]
        sizes += [total(argument.ranges[rank]) for argument in local.args]
        sizes += [total(entry.ranges[rank]) for entry in local.raw]
        first.setdefault(tuple(sizes), rank)
    return sorted({*first.values(), tp - 1})


def _num_changes(local: Local) -> int:
    return len(local.patches) + len(local.reshapes)


@dataclass(slots=True)
class _Search:
    """Changes tried for one region, those first whose code came furthest; of what passes, no more is kept
    than is needed.
    """

    glue: Glue
    region: DraftRegion
    tp: int
    shares: Sequence[Shares]
    tried: set[tuple[Any, ...]] = field(default_factory=set)
    verdicts: dict[tuple[Any, ...], Verdict] = field(default_factory=dict)
    error: str = ""  # of the candidate that came furthest
    furthest: tuple[int, int] = (-1, -1)

    def run(self, starts: Sequence[Local], budget: int) -> Local | None:
        """The first candidate that passes, with as few changes as it needs."""
        open_candidates: list[tuple[tuple[int, int], int, int, int, Local, Verdict]] = []
        for number, start in enumerate(starts):
            if self._try(number, start, open_candidates):
                return start
        while open_candidates and self.glue.num_checks <= budget:
            *_, number, candidate, failed = heapq.heappop(open_candidates)
            if _num_changes(candidate) - _num_changes(starts[number]) >= _MAX_CHANGES:
                continue
            for changed in self.changed(number, candidate, failed):
                if self._try(number, changed, open_candidates):
                    return self._needed(number, changed, starts[number])
                if self.glue.num_checks > budget:
                    break
        return None

    def _try(self, number: int, local: Local, open_candidates: list[Any]) -> bool:
        """Whether a candidate passes; if not it is kept, to be changed further."""
        failed = self.first_failure(number, local)
        if failed is None:
            return True
        rank, verdict = failed
        progress = (rank, verdict.progress)
        if progress > self.furthest:
            self.error, self.furthest = _explained(verdict, local), progress
        order = (-rank, -verdict.progress), _num_changes(local), len(self.tried)
        heapq.heappush(open_candidates, (*order, number, local, verdict))
        return False

    def _needed(self, number: int, found: Local, start: Local) -> Local:
        """``found`` without the changes that it passes without as well."""
        for key in [key for key in found.patches if key not in start.patches]:
            fewer = replace(found, patches={k: v for k, v in found.patches.items() if k != key})
            if self.first_failure(number, fewer) is None:
                found = fewer
        for entry in [entry for entry in found.reshapes if entry not in start.reshapes]:
            fewer = replace(found, reshapes=[other for other in found.reshapes if other != entry])
            if self.first_failure(number, fewer) is None:
                found = fewer
        return found

    def first_failure(self, number: int, local: Local) -> tuple[int, Verdict] | None:
        """The first rank that fails, and how; None if none of those does that tell the others too."""
        for rank in _telling_ranks(local, self.tp):
            changes = frozenset((key, values[rank]) for key, values in local.patches.items())
            mark = (number, rank, changes, frozenset(local.reshapes))
            if mark not in self.verdicts:
                self.verdicts[mark] = self.glue.check(local, rank)
            if self.verdicts[mark].error:
                return rank, self.verdicts[mark]
        return None

    def changed(self, number: int, candidate: Local, failed: Verdict) -> Iterator[Local]:
        """The candidate with one change more, those that were not tried yet."""
        for local in (*self._patched(candidate, failed), *self._reshaped(candidate, failed)):
            mark = (number, frozenset(local.patches.items()), frozenset(local.reshapes))
            if mark not in self.tried:
                self.tried.add(mark)
                yield local

    def _patched(self, candidate: Local, failed: Verdict) -> Iterator[Local]:
        """A suspect integer changed, to every value that a proportion of the region gives it."""
        for key in failed.suspects:
            if key not in self.glue.slots or key in candidate.patches:
                continue
            for share in self.shares:
                values = [key.old * part for part in share]
                if all(value.denominator == 1 and value >= 1 for value in values):
                    patch = tuple(int(value) for value in values)
                    yield replace(candidate, patches={**candidate.patches, key: patch})

    def _reshaped(self, candidate: Local, failed: Verdict) -> Iterator[Local]:
        """The reshape that failed repaired, if it is to the width of one of the region's consumers."""
        if failed.failed_reshape is None:
            return
        shape, sizes = failed.failed_reshape
        for pattern, columns in self.region.columns.items():
            old, values = self.region.widths[pattern], tuple(len(part) for part in columns)
            entry = Reshape(self.region.home, old, values)
            has_one = any((other.module, other.old) == (entry.module, old) for other in candidate.reshapes)
            if not has_one and any(repaired_sizes(shape, sizes, old, value) for value in values):
                yield replace(candidate, reshapes=[*candidate.reshapes, entry])


def _explained(verdict: Verdict, local: Local) -> str:
    """The error, with an operation that cannot be made rank-local where there is one."""
    for name, keys in verdict.draws.items():
        for key in keys:
            if key in local.patches:
                return (
                    f"{verdict.error}: torch.{name} draws numbers for {key.old} {key.attribute}, "
                    "a rank would draw others than the whole model"
                )
    return verdict.error


def _proportions(region: DraftRegion, tp: int) -> list[Shares]:
    """The shares in which the region's features, and their classes, are split, and ratios of these."""
    found: dict[Shares, None] = {}
    for pattern, parts in (*region.columns.items(), *region.rows.items()):
        found[tuple(Fraction(len(parts[rank]), region.widths[pattern]) for rank in range(tp))] = None
    for consumer in region.consumers:
        for name, cone in consumer.cones.items():
            parts = region.rows[name]
            for size in cone.sizes():  # query, key and value features of one fused weight
                members = cone.block_size == size
                whole = int(members.sum())
                found[tuple(Fraction(int(members[parts[rank]].sum()), whole) for rank in range(tp))] = None
    plain = list(found)
    for over in plain:
        for under in plain:
            if all(under):
                found[tuple(a / b for a, b in zip(over, under, strict=True))] = None
    return [share for share in found if any(part != 1 for part in share)]


# ------------------------------------------------------------------ arguments and raw parameters


def _measured_slices(glue: Glue, region: DraftRegion, tp: int) -> tuple[list[ArgumentSlice], list[RawSlice]]:
    """Arguments of the home, and raw parameters in it, of which ranks depend on different parts."""
    recording = glue.recordings[0]
    arguments = {
        (name, argument): value
        for (name, argument, index), value in recording.arguments.items()
        if index == 0 and pattern_of(name) == region.home
    }
    raw = {
        (name, ""): parameter
        for name, parameter in glue.model.named_parameters()
        if parameter.requires_grad
        and pattern_of(name).startswith(f"{region.home}.")
        and not is_splittable(glue.model.get_submodule(name.rpartition(".")[0]))
    }
    found_args: dict[tuple[str, str], ArgumentSlice] = {}
    found_raw: dict[str, RawSlice] = {}
    for (name, argument), (dim, size, ranges) in _dependence(recording, region, {**arguments, **raw}, tp):
        if argument:
            key = (pattern_of(name), argument)
            # From the end: a mask may gain a batch dimension where rows are padded.
            from_end = dim - arguments[name, argument].dim()
            found_args[key] = ArgumentSlice(pattern_of(name), argument, from_end, size, ranges)
        else:
            key_of_raw = glue.naming.key_of(name)
            found_raw[key_of_raw] = RawSlice(key_of_raw, dim, size, ranges)
    return list(found_args.values()), list(found_raw.values())


def _dependence(
    recording: Recording, region: DraftRegion, tensors: dict[tuple[str, str], torch.Tensor], tp: int
) -> Iterator[tuple[tuple[str, str], tuple[int, int, tuple[tuple[Range, ...], ...]]]]:
    """(tensor, (dimension, its size, ranges a rank)) where each rank's columns depend on another part."""
    if not tensors:
        return
    for consumer in region.consumers:
        parts: list[dict[tuple[str, str], dict[int, tuple[Range, ...]]]] = []
        for columns in region.columns[consumer.call.pattern]:
            reached = _reached(consumer.calls, columns, tensors)
            parts.append({name: _partial_dims(hit) for name, hit in reached.items()})
        for name, tensor in tensors.items():
            for dim in range(tensor.dim()):
                ranges = tuple(part.get(name, {}).get(dim, ()) for part in parts)
                if all(ranges) and len(set(ranges)) > 1:
                    yield name, (dim, tensor.shape[dim], ranges)


def _reached(
    calls: Sequence[Call], columns: torch.Tensor, tensors: dict[tuple[str, str], torch.Tensor]
) -> dict[tuple[str, str], torch.Tensor]:
    """Which elements of the tensors the columns of any of the inputs depend on."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for call in calls:
        x = call.consumed
        weights = torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(7)).detach()
        cotangent = torch.zeros_like(x)
        cotangent[..., columns] = weights[..., columns]
        leaves = list(tensors.values())
        gradients = torch.autograd.grad(x, leaves, cotangent, retain_graph=True, allow_unused=True)
        for name, gradient in zip(tensors, gradients, strict=True):
            if gradient is not None:
                hit = gradient != 0
                found[name] = found[name] | hit if name in found else hit
    return found


def _partial_dims(reached: torch.Tensor) -> dict[int, tuple[Range, ...]]:
    """Per dimension of which some but not all indices are reached, those indices."""
    found: dict[int, tuple[Range, ...]] = {}
    for dim in range(reached.dim()):
        hit = reached.movedim(dim, 0).reshape(reached.shape[dim], -1).any(1)
        if bool(hit.any()) and not bool(hit.all()):
            found[dim] = ranges_of(hit.nonzero().flatten())
    return found
