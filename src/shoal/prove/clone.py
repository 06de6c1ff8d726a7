"""A small model of the same class and the same head structure, on which a plan can be proved. Knows
no weights.

Head counts, and everything else that the plan counts, stay. Head size, hidden size, neurons and
vocabulary shrink: a value of the config shrinks if it is a multiple of the head size, the width of a
neuron region, or the vocabulary. Whether the guess was right is not believed but measured: the clone
must have the same parameters, and its regions the same divisions, as the real model.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

from torch import nn

from shoal.errors import PlanError
from shoal.plan.cones import measure
from shoal.plan.drive import batch_of
from shoal.plan.probe import record
from shoal.plan.skeleton import build_on_meta, build_probe, cut_depth, embedding_size
from shoal.plan.types import Plan, Split
from shoal.prove.simulate import Subject, random_subject
from shoal.prove.substitute import RegionMismatchError, check_structure, substitute

__all__ = ["Clone", "find_clone"]

_HEAD_SIZES = (16, 8, 32)  # of the clone; the first that works
_MAX_ELEMENTS = 40_000_000  # of the clone: 320 MB in float64
_FEW_NEURONS = 8  # per rank
_TOKENS = 8  # of the batch on which the data flow is measured


@dataclass(frozen=True, slots=True)
class Clone:
    """The small model: its config, itself on meta, and with random weights and what it then gives."""

    config: Any
    small: nn.Module
    subject: Subject

    @property
    def elements(self) -> int:
        """Parameters of the small model."""
        return sum(parameter.numel() for parameter in self.small.parameters())


def find_clone(plan: Plan, model_class: type[nn.Module], config: Any) -> Clone:
    """The first candidate that has the real model's parameters, runs, and in which the plan's regions are
    what the plan says.

    Raises:
        RegionMismatchError: a region differs in every candidate.
        PlanError: none is small enough to be computed, or none can be run.
    """
    full = build_on_meta(model_class, config)
    cut = cut_depth(model_class, config, full)
    names = [name for name, _ in build_on_meta(model_class, cut.config).named_parameters()]
    mismatch: RegionMismatchError | None = None
    failure = "no candidate has the same parameters"
    for candidate in _candidates(plan, cut.config):
        try:
            small = build_on_meta(model_class, candidate)
            if [name for name, _ in small.named_parameters()] != names:
                continue
            if sum(parameter.numel() for parameter in small.parameters()) > _MAX_ELEMENTS:
                failure = "none is small enough"
                continue
            if plan.regions:
                _check_regions(plan, model_class, candidate, small)
            return Clone(candidate, small, random_subject(model_class, candidate))
        except RegionMismatchError as error:
            mismatch = mismatch or error
        except Exception as error:  # a config or its model refuses values in any way; the next may fit
            failure = f"{type(error).__name__}: {str(error)[:200]}"
    raise mismatch or PlanError(f"no small {model_class.__name__} to prove the plan on: {failure}")


def _check_regions(plan: Plan, model_class: type[nn.Module], config: Any, small: nn.Module) -> None:
    """Measure the small model's data flow and hold the plan, with its widths, against it."""
    recording = record(build_probe(model_class, config), batch_of(embedding_size(config), 1, _TOKENS))
    check_structure(substitute(plan, small), measure(recording))


def _candidates(plan: Plan, config: Any) -> Iterator[Any]:
    """Shrunken configs, the most shrunken first; the unchanged one last."""
    heads = {count for region in plan.regions for count in region.divisions if count < region.width}
    head_size = _head_size(plan, config)
    sizes = [size for size in _HEAD_SIZES if head_size % size == 0 and head_size > size]
    for small_size, whole_heads in itertools.product(sizes, (True, False)):
        # Multiples of the head size shrink; then parts of a head too (rotary dimensions). A head count
        # that is also a multiple may be either.
        doubtful = sorted(count for count in heads if count % head_size == 0)
        for count in range(len(doubtful) + 1):
            for widths in itertools.combinations(doubtful, count):
                unit = head_size if whole_heads else head_size // small_size
                yield _shrunken(plan, config, heads - set(widths), unit, unit * small_size // head_size)
    yield _shrunken(plan, config, heads, 1 << 62, 1)
    yield copy.deepcopy(config)


def _head_size(plan: Plan, config: Any) -> int:
    """Features of a head: from the finest division into heads, or else as the config says."""
    sizes = [
        region.width // max(counts)
        for region in plan.regions
        if (counts := [count for count in region.divisions if count < region.width])
    ]
    if sizes:
        return min(sizes)
    hidden, heads = getattr(config, "hidden_size", 64), getattr(config, "num_attention_heads", 1)
    return int(hidden // heads) if isinstance(hidden, int) and isinstance(heads, int) and heads else 64


def _shrunken(plan: Plan, config: Any, kept: set[int], unit: int, small_unit: int) -> Any:
    """The config with multiples of ``unit`` made as many ``small_unit``, and neurons and vocabulary small."""
    neurons = _neuron_widths(plan)
    vocabularies = {split.size for split in plan.params.values() if split.op == "vocab"}
    vocabularies.add(getattr(config, "vocab_size", 0))
    widths = {region.width for region in plan.regions}
    own = copy.deepcopy(config)
    for name, value in list(vars(own).items()):
        if type(value) is not int or value < 8 or name.startswith("_") or name.endswith("_token_id"):
            continue
        if value in kept:
            continue
        if value in neurons:
            vars(own)[name] = neurons[value]
        elif value in vocabularies and value > 32 * plan.tp and value not in widths:
            vars(own)[name] = small_vocabulary(value, plan.tp)
        elif value % unit == 0:
            vars(own)[name] = value // unit * small_unit
    _keep_token_ids(own)
    return own


def small_vocabulary(size: int, tp: int) -> int:
    """A small size that the ranks share as unevenly as the real one."""
    return min(size, 32 * tp + size % tp)


def _keep_token_ids(config: Any) -> None:
    """Special ids beyond the small vocabulary become 0: they only mark padding and ends."""
    size = getattr(config, "vocab_size", None)
    for name, value in list(vars(config).items()):
        if name.endswith("_token_id") and type(value) is int and isinstance(size, int) and value >= size:
            vars(config)[name] = 0


def _neuron_widths(plan: Plan) -> Mapping[int, int]:
    """Widths of regions whose components are single features -> a smaller width with the same shares."""
    found: dict[int, int] = {}
    for region in plan.regions:
        if region.divisions == (region.width,):
            found[region.width] = _scaled_width(plan.params[region.consumer])
    return found


def _scaled_width(split: Split) -> int:
    """The smallest width at which the ranks' borders are whole, with a few features a rank."""
    borders = [bound for ranges in split.ranges for pair in ranges for bound in pair]
    unit = split.size // reduce(gcd, borders, split.size)
    return min(split.size, unit * -(-_FEW_NEURONS * len(split.ranges) // unit))
