"""Smaller configs for a plan to be proved on. Knows no model: whoever asks says which configs serve.

Head counts, and everything else that the plan counts, stay. Head size, hidden size, neurons and vocabulary
shrink: a value of the config shrinks if it is a multiple of the head size, the width of a neuron region, or
the vocabulary. That is a guess. Where what it gives is still big, other values (experts, positions, latents)
are made smaller one by one, for as long as the model still serves.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

from shoal.plan.settings import Path, children, integers, vocabulary_size, with_values
from shoal.plan.types import Plan, Split

__all__ = ["Structure", "candidates", "shrink_further", "small_vocabulary", "structure_of"]

_HEAD_SIZES = (16, 8, 32, 4, 20, 12, 10, 6)  # of the small model; the first that works
_RATIOS = (8, 4, 16, 2)  # by which all widths may be divided
_FEW_NEURONS = 8  # per rank
_LEAST = 8  # values below are no widths, and none becomes smaller
_WIDE, _LEAST_WIDTH = 512, 32  # what is likely a width keeps so many features
_STEPS = (64, 16, 4, 2)  # by which other values are divided, the most first
_LEAST_SAVED = 0.05  # share of the elements that a change must save to be tried


@dataclass(frozen=True, slots=True)
class Structure:
    """What a plan counts, which stays, and the widths that may shrink."""

    tp: int
    heads: frozenset[int]  # numbers of heads, KV groups, experts ... as the plan divides widths into
    head_size: int
    neurons: Mapping[int, int]  # width of a region of single features -> a smaller one of the same shares
    vocabularies: frozenset[int]
    widths: frozenset[int]  # of regions


def structure_of(plan: Plan, config: Any) -> Structure:
    """Read a plan's counts and widths."""
    heads = {count for region in plan.regions for count in region.divisions if count < region.width}
    heads |= {split.size for split in plan.params.values() if split.op == "experts"}
    vocabularies = {split.size for split in plan.params.values() if split.op == "vocab"}
    for _, inner in children(config):
        vocabularies |= {size for size in (vocabulary_size(inner),) if size is not None}
    return Structure(
        tp=plan.tp,
        heads=frozenset(heads),
        head_size=_head_size(plan, config),
        neurons=_neuron_widths(plan),
        vocabularies=frozenset(vocabularies),
        widths=frozenset(region.width for region in plan.regions),
    )


def _head_size(plan: Plan, config: Any) -> int:
    """Features of a head: from the finest division into heads, or else as the config says."""
    sizes = [
        region.width // max(counts)
        for region in plan.regions
        if (counts := [count for count in region.divisions if count < region.width])
    ]
    if sizes:
        return min(sizes)
    for _, inner in children(config):
        hidden, heads = getattr(inner, "hidden_size", None), getattr(inner, "num_attention_heads", None)
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            return hidden // heads
    return 64


def _neuron_widths(plan: Plan) -> Mapping[int, int]:
    """Widths of regions whose components are single features -> a smaller width with the same shares; those
    that some heads have together, too, shrink with these.
    """
    of_heads = {region.width for region in plan.regions if region.divisions != (region.width,)}
    return {
        region.width: _scaled_width(plan.params[region.consumer], region.width)
        for region in plan.regions
        if region.width not in of_heads
    }


def _scaled_width(split: Split, width: int) -> int:
    """The smallest width at which the ranks' borders are whole, with a few features a rank.

    Where the split dimension holds the features several times (an expert after the other), borders count
    from the beginning of each; where it is one of several, the others stay as they are.
    """
    size = min(split.size, width)
    borders = [bound % size for ranges in split.ranges for pair in ranges for bound in pair]
    unit = size // reduce(gcd, borders, size)
    return min(size, unit * -(-_FEW_NEURONS * len(split.ranges) // unit)) * (width // size)


def small_vocabulary(size: int, tp: int) -> int:
    """A small size that the ranks share as unevenly as the real one."""
    return min(size, 32 * tp + size % tp)


# ------------------------------------------------------------------ all widths at once


def candidates(structure: Structure, config: Any) -> Iterator[Any]:
    """Shrunken configs, the likeliest first; the unchanged one last.

    Multiples of the head size shrink, then multiples of a ratio, so that parts of a head (rotary dimensions)
    and heads of several sizes shrink too. A head count that is also a multiple may be either.
    """
    head_size = structure.head_size
    sizes = [size for size in _HEAD_SIZES if head_size % size == 0 and head_size > size]
    ratios = [head_size // size for size in sizes]
    units = [(head_size, size) for size in sizes[:2]]
    units += [(ratio, 1) for ratio in dict.fromkeys([*ratios[:2], *_RATIOS, *ratios[2:]])]
    units += [(head_size, size) for size in sizes[2:]]
    for unit, small_unit in units:
        doubtful = sorted(count for count in structure.heads if count % unit == 0)
        for number in range(min(len(doubtful), 2) + 1):
            for widths in itertools.combinations(doubtful, number):
                yield _shrunken(structure, config, frozenset(widths), unit, small_unit)
    yield _shrunken(structure, config, frozenset(), 1 << 62, 1)
    yield with_values(config, {})


def _shrunken(
    structure: Structure, config: Any, no_counts: frozenset[int], unit: int, small_unit: int
) -> Any:
    """The config with multiples of ``unit`` made as many ``small_unit``, and neurons and vocabulary small."""
    kept = structure.heads - no_counts
    changed: dict[Path, int] = {}
    for path, value in integers(config):
        if value < _LEAST or _is_token_id(path) or value in kept:
            continue
        if value in structure.neurons:
            changed[path] = structure.neurons[value]
        elif value in structure.vocabularies and value > 32 * structure.tp and value not in structure.widths:
            changed[path] = small_vocabulary(value, structure.tp)
        elif value % unit == 0:
            changed[path] = value // unit * small_unit
    return _with_known_tokens(with_values(config, changed))


def _is_token_id(path: Path) -> bool:
    return any(str(key).endswith(("_token_id", "_index", "_token_ids")) for key in path)


def _with_known_tokens(config: Any) -> Any:
    """Special ids beyond the small vocabulary become 0: they only mark padding and ends."""
    size = vocabulary_size(config)
    beyond = {path: 0 for path, value in integers(config) if _is_token_id(path) and size and value >= size}
    return with_values(config, beyond) if beyond else config


# ------------------------------------------------------------------ other values, one by one


def shrink_further(
    structure: Structure,
    config: Any,
    elements_of: Callable[[Any], int | None],
    runs: Callable[[Any], bool],
    target: int,
    deadline_s: float,
) -> Any:
    """Divide single values of a config by as much as the model still serves with.

    Args:
        structure: whose counts stay.
        config: one that serves.
        elements_of: a config's number of parameter elements, None if it does not serve.
        runs: whether the model of a config that serves can be run.
        target: elements at which there is nothing left to do.
        deadline_s: on ``time.monotonic``'s clock; what was reached by then is returned.

    Returns:
        the smallest config found.
    """
    elements = elements_of(config) or 0
    for paths, step in _savings(structure, config, elements_of, elements, deadline_s):
        if elements <= target or time.monotonic() > deadline_s:
            break
        for divisor in [entry for entry in _STEPS if entry <= step]:
            smaller = _divided(config, paths, divisor)
            count = elements_of(smaller) if smaller is not None else None
            if count is not None and count < elements and runs(smaller):
                config, elements = smaller, count
                break
    return config


_Paths = tuple[Path, ...]  # of values that are divided together


def _savings(
    structure: Structure,
    config: Any,
    elements_of: Callable[[Any], int | None],
    elements: int,
    deadline_s: float,
) -> list[tuple[_Paths, int]]:
    """(paths, largest divisor that serves) of the values that save the most, those first."""
    found: list[tuple[int, _Paths, int]] = []
    for paths in _moves(structure, config):
        if time.monotonic() > deadline_s:
            break
        for divisor in _STEPS:
            smaller = _divided(config, paths, divisor)
            count = elements_of(smaller) if smaller is not None else None
            if count is not None:
                if count < elements * (1 - _LEAST_SAVED):
                    found.append((count, paths, divisor))
                break
    return [(paths, divisor) for _, paths, divisor in sorted(found, key=lambda entry: entry[0])]


def _moves(structure: Structure, config: Any) -> Iterator[_Paths]:
    """Values that may be divided, each alone, and equal ones together: a width may have several names."""
    by_value: dict[int, list[Path]] = {}
    for path, value in integers(config):
        if value >= _LEAST and not _is_token_id(path) and value not in structure.heads:
            by_value.setdefault(value, []).append(path)
    for paths in by_value.values():
        if len(paths) > 1:
            yield tuple(paths)
        yield from ((path,) for path in paths)


def _divided(config: Any, paths: _Paths, divisor: int) -> Any:
    """The config with these values divided, or None where that leaves too little."""
    values = dict(integers(config))
    smaller = {path: values[path] // divisor for path in paths}
    if any(value < (_LEAST_WIDTH if values[path] >= _WIDE else _LEAST) for path, value in smaller.items()):
        return None
    return _with_known_tokens(with_values(config, smaller))
