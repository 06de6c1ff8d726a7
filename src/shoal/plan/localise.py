"""Finds what a region needs changed on a rank besides its weights: integers in the module's code,
arguments, raw parameters. Knows no attribute names; every finding is one that passed the glue check.

Which arguments and raw parameters depend on the rank is measured, by the gradients of the rank's
columns. Integers are searched breadth first, fewest changes first: only those that the failing run had
used in a tensor operation are suspects, and only values in a proportion that occurs in the region.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import torch

from shoal.plan.glue import Glue, Local, RawSlice
from shoal.plan.integers import IntegerKey, integer_slots
from shoal.plan.linears import is_splittable
from shoal.plan.probe import Recording
from shoal.plan.regions import DraftRegion, ranges_of
from shoal.plan.types import ArgumentSlice, Range, pattern_of

__all__ = ["localise"]

_MAX_CHECKS = 200  # glue checks per region before it is given up
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
    start = accepted.plus(region)
    args, raw = _measured_slices(glue, region, tp)
    start.raw += raw
    variants = [Local(start.regions, start.patches, [*start.args, *args], start.raw)] if args else []
    variants.append(start)  # an argument may come from a part of the same region: cut already
    shares = _proportions(region, tp)
    slots = _slot_values(glue, region)
    tried: set[tuple[int, frozenset[tuple[IntegerKey, tuple[int, ...]]]]] = set()
    level = [(number, variant) for number, variant in enumerate(variants)]
    budget = glue.num_checks + _MAX_CHECKS
    error = ""
    for _ in range(_MAX_CHANGES + 1):
        following: list[tuple[int, Local]] = []
        for number, candidate in level:
            if glue.num_checks > budget:
                region.reason = f"no change of integers makes its code rank-local: {error}"
                return None
            failed = _first_failure(glue, candidate, tp)
            if failed is None:
                return candidate
            error, suspects = failed
            for key, values in _changes(suspects, slots, shares, candidate):
                patches = {**candidate.patches, key: values}
                mark = (number, frozenset(patches.items()))
                if mark not in tried:
                    tried.add(mark)
                    following.append(
                        (number, Local(candidate.regions, patches, candidate.args, candidate.raw))
                    )
        level = following
    region.reason = f"its code does not become rank-local: {error}"
    return None


def _first_failure(glue: Glue, local: Local, tp: int) -> tuple[str, list[IntegerKey]] | None:
    for rank in range(tp):
        verdict = glue.check(local, rank)
        if verdict.error:
            return verdict.error, verdict.suspects
    return None


def _changes(
    suspects: Sequence[IntegerKey],
    slots: set[IntegerKey],
    shares: Sequence[Shares],
    candidate: Local,
) -> Iterator[tuple[IntegerKey, tuple[int, ...]]]:
    """Suspects with every value per rank that a proportion of the region gives them."""
    for key in suspects:
        if key not in slots or key in candidate.patches:
            continue
        for share in shares:
            values = [key.old * part for part in share]
            if all(value.denominator == 1 and value >= 1 for value in values):
                yield key, tuple(int(value) for value in values)


def _slot_values(glue: Glue, region: DraftRegion) -> set[IntegerKey]:
    return {key for _, key in integer_slots(glue.model, region.home)}


def _proportions(region: DraftRegion, tp: int) -> list[Shares]:
    """The shares in which the region's features, and their classes, are split, and ratios of these."""
    found: dict[Shares, None] = {}
    for pattern, parts in (*region.columns.items(), *region.rows.items()):
        found[tuple(Fraction(len(parts[rank]), region.widths[pattern]) for rank in range(tp))] = None
    for consumer in region.consumers:
        for name, cone in consumer.cones.items():
            parts = region.rows[pattern_of(name)]
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
            found_args[key] = ArgumentSlice(pattern_of(name), argument, dim, size, ranges)
        else:
            found_raw[pattern_of(name)] = RawSlice(pattern_of(name), dim, size, ranges)
    return list(found_args.values()), list(found_raw.values())


def _dependence(
    recording: Recording, region: DraftRegion, tensors: dict[tuple[str, str], torch.Tensor], tp: int
) -> Iterator[tuple[tuple[str, str], tuple[int, int, tuple[tuple[Range, ...], ...]]]]:
    """(tensor, (dimension, its size, ranges a rank)) where each rank's columns depend on another part."""
    if not tensors:
        return
    names, leaves = list(tensors), list(tensors.values())
    for consumer in region.consumers:
        x = consumer.call.inputs[0]
        weights = torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(7)).detach()
        parts: list[dict[tuple[str, str], dict[int, tuple[Range, ...]]]] = []
        for rank in range(tp):
            columns = region.columns[consumer.call.pattern][rank]
            cotangent = torch.zeros_like(x)
            cotangent[..., columns] = weights[..., columns]
            gradients = torch.autograd.grad(x, leaves, cotangent, retain_graph=True, allow_unused=True)
            parts.append(
                {
                    name: _partial_dims(gradient)
                    for name, gradient in zip(names, gradients, strict=True)
                    if gradient is not None
                }
            )
        for name in names:
            for dim in range(tensors[name].dim()):
                ranges = tuple(part.get(name, {}).get(dim, ()) for part in parts)
                if all(ranges) and len(set(ranges)) > 1:
                    yield name, (dim, tensors[name].shape[dim], ranges)


def _partial_dims(gradient: torch.Tensor) -> dict[int, tuple[Range, ...]]:
    """Per dimension of which some but not all indices have a gradient, those indices."""
    found: dict[int, tuple[Range, ...]] = {}
    for dim in range(gradient.dim()):
        hit = (gradient.movedim(dim, 0).reshape(gradient.shape[dim], -1) != 0).any(1)
        if bool(hit.any()) and not bool(hit.all()):
            found[dim] = ranges_of(hit.nonzero().flatten())
    return found
