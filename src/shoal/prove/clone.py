"""A small model of the same class and the same head structure, on which a plan can be proved. Knows
no weights.

Which config gives one is guessed (:mod:`shoal.prove.shrink`). Whether the guess was right is not believed but
measured: the clone must have the same parameters, and its regions the same divisions, as the real model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.errors import PlanError
from shoal.plan.drive import batch_of
from shoal.plan.naming import Naming
from shoal.plan.probe import record
from shoal.plan.skeleton import build_on_meta, build_probe, cut_depth, embedding_size, shorten_lengths
from shoal.plan.survey import data_flow
from shoal.plan.types import Plan, pattern_of
from shoal.prove.shrink import Structure, candidates, shrink_further, structure_of
from shoal.prove.simulate import Subject, random_subject
from shoal.prove.substitute import RegionMismatchError, check_structure, substitute

__all__ = ["Clone", "find_clone"]

_MAX_ELEMENTS = 40_000_000  # of the clone: 320 MB in float64
_ENOUGH_ELEMENTS = 4_000_000  # below, making it smaller costs more than it saves
_HEAD_FEATURES = 4  # of a head, at least
_SHRINK_S = 3.0  # how long to look for a smaller one
_TOKENS = 8  # of the batch that shows whether a config's model runs


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
        PlanError: none is small enough to be computed, or none can be run; the message says what stopped
            the likeliest.
    """
    full = build_on_meta(model_class, config)
    short = cut_depth(model_class, config, full).config
    if plan.evidence.get("short_lengths"):
        short = shorten_lengths(model_class, short)
    search = _Search(plan, model_class, _shape_of(build_on_meta(model_class, short)))
    structure = structure_of(plan, short)
    mismatch: RegionMismatchError | None = None
    failures: list[str] = []
    for candidate in candidates(structure, short):
        try:
            elements = search.elements(candidate)
            if elements > _ENOUGH_ELEMENTS:
                candidate = search.shrunk(structure, candidate)
                elements = search.elements(candidate)
            if elements > _MAX_ELEMENTS:
                raise PlanError(f"it has {elements / 1e6:.0f} million parameters, too many to compute")
            return search.finished(candidate)
        except RegionMismatchError as error:
            mismatch = mismatch or error
        except Exception as error:  # a config or its model refuses values in any way; the next may fit
            failures.append(f"{type(error).__name__}: {str(error)[:200]}")
    raise mismatch or PlanError(
        f"no small {model_class.__name__} to prove the plan on, of {len(failures)} tried: {failures[0]}"
    )


def _shape_of(model: nn.Module) -> dict[str, int]:
    """Names of parameters and their numbers of dimensions."""
    return {name: parameter.dim() for name, parameter in model.named_parameters()}


@dataclass(frozen=True, slots=True)
class _Search:
    """What a candidate is held against."""

    plan: Plan
    model_class: type[nn.Module]
    shape: dict[str, int]  # of the real model

    def elements(self, config: Any) -> int:
        """Parameter elements of a config's model.

        Raises:
            RegionMismatchError: the plan's borders do not scale to its widths.
            PlanError: it has other parameters.
            Exception: whatever the model's constructor raises.
        """
        small = build_on_meta(self.model_class, config)
        if _shape_of(small) != self.shape:
            raise PlanError("it has other parameters")
        self._check_heads(substitute(self.plan, small))
        return sum(parameter.numel() for parameter in small.parameters())

    def _check_heads(self, own: Plan) -> None:
        """A head of one or two features would hide what goes on inside heads.

        Raises:
            PlanError: there are such.
        """
        for region in own.regions:
            counts = [count for count in region.divisions if count < region.width]
            whole, small = self.plan.params[region.consumer].size, own.params[region.consumer].size
            if counts and small < whole and region.width * small < _HEAD_FEATURES * max(counts) * whole:
                raise PlanError(f"the heads that feed {region.consumer} get too small")

    def shrunk(self, structure: Structure, config: Any) -> Any:
        """A smaller config than one that serves, if there is one."""

        def elements_of(smaller: Any) -> int | None:
            try:
                return self.elements(smaller)
            except Exception:  # as above: then this value stays as it is
                return None

        deadline = time.monotonic() + _SHRINK_S
        return shrink_further(structure, config, elements_of, self._runs, _ENOUGH_ELEMENTS, deadline)

    def _runs(self, config: Any) -> bool:
        """Whether the model takes as many tokens as it will be given, without its weights."""
        tokens = max(_TOKENS, int(self.plan.evidence.get("long_tokens", 0)))
        try:
            record(build_probe(self.model_class, config), batch_of(embedding_size(config), 1, tokens))
        except Exception:  # as above
            return False
        return True

    def finished(self, config: Any) -> Clone:
        """The clone, its regions checked and its outputs computed.

        Raises:
            RegionMismatchError: a region differs.
            Exception: whatever the model's own code raises.
        """
        small = build_on_meta(self.model_class, config)
        if self.plan.regions:
            _check_regions(self.plan, self.model_class, config, small)
        long_tokens = int(self.plan.evidence.get("long_tokens", 0))
        return Clone(config, small, random_subject(self.model_class, config, long_tokens))


def _check_regions(plan: Plan, model_class: type[nn.Module], config: Any, small: nn.Module) -> None:
    """Measure the small model's data flow and hold the plan, with its widths, against it."""
    flow = data_flow(build_probe(model_class, config), config, _names_in(plan))
    check_structure(substitute(plan, small), flow)


def _names_in(plan: Plan) -> Naming:
    """Weights as the plan calls them."""
    exact = {name for name in plan.params if pattern_of(name) != name}
    return Naming({name: name for name in exact})
