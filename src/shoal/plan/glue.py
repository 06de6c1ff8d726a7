"""The glue check: does a model's own code, between the weights, compute a rank's part when it is given
a rank's part? Knows no search.

All weights are stubs that replay a recording; the rank's code must hand every planned consumer exactly
its columns, everything else exactly what the whole model handed it, in prefill and decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shoal.plan.cutting import argument_hook, cut_ranges
from shoal.plan.drive import Pass
from shoal.plan.integers import IntegerKey, IntegerTrace, TracedInt, integer_places, write_integer
from shoal.plan.linears import is_splittable, output_attribute
from shoal.plan.naming import Naming
from shoal.plan.probe import GlueError, Recording, Replay, replay
from shoal.plan.regions import DraftRegion
from shoal.plan.repair import repair
from shoal.plan.types import ArgumentSlice, Range, Reshape, pattern_of, total

__all__ = ["Glue", "Local", "Verdict"]

Patches = Mapping[IntegerKey, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RawSlice:
    """A raw parameter (a sink, a query bias) of which a rank's code needs its part along ``dim``."""

    pattern: str
    dim: int
    size: int
    ranges: tuple[tuple[Range, ...], ...]  # one entry a rank


@dataclass(slots=True)
class Local:
    """Everything that makes code rank-local: split regions, changed integers, cut arguments and tensors,
    repaired reshapes."""

    regions: list[DraftRegion] = field(default_factory=list)
    patches: dict[IntegerKey, tuple[int, ...]] = field(default_factory=dict)
    args: list[ArgumentSlice] = field(default_factory=list)
    raw: list[RawSlice] = field(default_factory=list)
    reshapes: list[Reshape] = field(default_factory=list)

    def plus(self, region: DraftRegion) -> Local:
        """A copy with one region more."""
        return replace(self, regions=[*self.regions, region])

    def part(self, rank: int) -> Replay:
        """The rank's columns and rows of all regions."""
        columns = {name: parts[rank] for region in self.regions for name, parts in region.columns.items()}
        rows = {name: parts[rank] for region in self.regions for name, parts in region.rows.items()}
        return Replay(columns, rows, self.slabs(rank))

    def sizes(self, rank: int) -> tuple[int, ...]:
        """All that differs from rank to rank in size: ranks of equal sizes run the same code."""
        found: list[int] = []
        for region in self.regions:
            found += [len(part[rank]) for part in (*region.columns.values(), *region.rows.values())]
        found += [total(argument.ranges[rank]) for argument in self.args]
        found += [total(raw.ranges[rank]) for raw in self.raw]
        found += [values[rank] for values in self.patches.values()]
        return (*found, *(reshape.values[rank] for reshape in self.reshapes))

    def slabs(self, rank: int) -> dict[str, tuple[int, torch.Tensor]]:
        """The rank's part of every weight that code of its own multiplies by."""
        return {
            name: (region.slabs[name].dim, region.slabs[name].parts[rank])
            for region in self.regions
            for name in region.products & region.slabs.keys()
        }


@dataclass(slots=True)
class Verdict:
    """What a check found: no error, or one and the integers used last before it."""

    error: str = ""
    suspects: list[IntegerKey] = field(default_factory=list)
    failed_reshape: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # shape, sizes wanted
    draws: dict[str, tuple[IntegerKey, ...]] = field(default_factory=dict)  # sizes of random operations
    progress: int = 0  # operations that were run
    passes: list[list[Pass]] = field(default_factory=list)  # per recording


@dataclass(slots=True)
class Glue:
    """A probe model and its recordings, to be replayed rank by rank."""

    model: nn.Module
    recordings: list[Recording]
    slots: frozenset[IntegerKey] = frozenset()  # integers that may be changed: of the model as it is built
    num_checks: int = 0
    naming: Naming = field(default_factory=Naming)  # of the weights in the recordings

    def check(self, local: Local, rank: int, traced: bool = True) -> Verdict:
        """Replay every recording as ``rank``.

        Args:
            local: what is split and changed.
            rank: whose part.
            traced: put traced integers into the homes of the regions, for ``suspects``.
        """
        self.num_checks += 1
        trace = IntegerTrace()
        verdict = Verdict()
        try:
            with self._localised(local, rank, traced):
                for recording in self.recordings:
                    verdict.passes.append(replay(self.model, recording, local.part(rank), trace))
        except GlueError as error:
            verdict.error = str(error)
        except Exception as error:  # the model's own code fails on shapes in any way it likes
            verdict.error = f"{type(error).__name__}: {str(error)[:200]}"
        verdict.suspects = trace.suspects()
        verdict.failed_reshape, verdict.progress = trace.failed_reshape, trace.num_operations
        verdict.draws = trace.draws
        return verdict

    @contextmanager
    def _localised(self, local: Local, rank: int, traced: bool) -> Iterator[None]:
        """The model changed for a rank, and changed back afterwards."""
        with ExitStack() as undo:
            for home in {home for region in local.regions for home in self._homes(region)}:
                for module, key in list(integer_places(self.model, home)):
                    values = local.patches.get(key)
                    value = key.old if values is None else values[rank]
                    if traced or values is not None:
                        undo.callback(write_integer, module, key.attribute, key.old)
                        write_integer(module, key.attribute, TracedInt(value, (key,)) if traced else value)
            self._cut_tensors(local, rank, undo)
            for name, module in self.model.named_modules():
                pattern = pattern_of(name)
                for argument in local.args:
                    if pattern == argument.module:
                        hook = argument_hook(argument, rank)
                        undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                widths = [(r.old, r.values[rank]) for r in local.reshapes if r.module == pattern]
                if widths:
                    undo.callback(repair(module, widths))
            yield

    def _homes(self, region: DraftRegion) -> Iterator[str]:
        """The modules whose code lies between producers and consumers: the region's home, and around a
        producer outside the stack of layers what shapes its result for all of them.
        """
        yield region.home
        for pattern in (pattern for pattern in region.rows if "*" not in pattern_of(pattern)):
            owner = pattern.rpartition(".")[0].rpartition(".")[0]
            while owner and isinstance(self.model.get_submodule(owner), nn.Sequential | nn.ModuleList):
                owner = owner.rpartition(".")[0]
            is_around = f"{region.home}.".startswith(f"{owner}.") or not owner
            if not is_around and not f"{owner}.".startswith(f"{region.home}."):
                yield owner

    def _cut_tensors(self, local: Local, rank: int, undo: ExitStack) -> None:
        """Cut raw parameters, and what producers' own code may read: their bias, their number of features."""
        rows, slabs = local.part(rank).rows, local.slabs(rank)
        for name, module in self.model.named_modules():
            prefix = f"{name}." if name else ""
            bias = module._parameters.get("bias")
            kept = rows.get(self.naming.key_of(f"{prefix}weight"))
            if kept is not None and is_splittable(module):
                counter = output_attribute(module)
                undo.callback(setattr, module, counter, getattr(module, counter))
                setattr(module, counter, len(kept))
                if bias is not None and not bias.is_meta:
                    _replace(module, "bias", bias.index_select(0, kept), undo)
            for attribute, parameter in list(module._parameters.items()):
                slab = slabs.get(self.naming.key_of(f"{prefix}{attribute}"))
                if slab is not None and parameter is not None:
                    _replace(module, attribute, parameter.index_select(*_on(parameter, slab)), undo)
            for raw in local.raw:
                attribute = raw.pattern.rpartition(".")[2]
                whole = module._parameters.get(attribute)
                if whole is not None and self.naming.key_of(f"{prefix}{attribute}") == raw.pattern:
                    _replace(module, attribute, cut_ranges(whole, raw.dim, raw.ranges[rank]), undo)


def _on(parameter: torch.Tensor, slab: tuple[int, torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Dimension and indices, the latter where the parameter is."""
    return slab[0], slab[1].to(parameter.device)


def _replace(module: nn.Module, attribute: str, value: torch.Tensor, undo: ExitStack) -> None:
    undo.callback(module._parameters.__setitem__, attribute, module._parameters[attribute])
    module._parameters[attribute] = nn.Parameter(value.detach(), requires_grad=False)
