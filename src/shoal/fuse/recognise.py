"""Recognises what a layer computes from one run of it, by numbers: norms, projections, rotary, attention,
MLP, sums. Knows no model names and no kernels; what it says is a hypothesis until it is proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import nn

from shoal.fuse.attention_reader import look_at_attention
from shoal.fuse.common import UnrecognisedError, is_linear
from shoal.fuse.match import find_activation, find_gate, find_norm, find_sum, is_close
from shoal.fuse.recipe import (
    INPUT,
    Attend,
    Combine,
    Foreign,
    Gate,
    LayerRecipe,
    Norm,
    Piece,
    Project,
    Step,
    modules,
    reads,
)
from shoal.fuse.record import AttentionCall, LayerCall, LayerRun, Noted, rows_of, run_layer
from shoal.shard.layers import GatheredConv1D, GatheredLinear, RowConv1D, RowLinear

__all__ = ["UnrecognisedError", "recognise", "refuse", "suppose"]


def recognise(layer: nn.Module, call: LayerCall) -> LayerRecipe:
    """What the layer computes.

    Args:
        layer: float32, with its weights; over several ranks all ranks call together.
        call: as the model called it, with hidden states of random numbers and T tokens, T being no other
            dimension of the layer.

    Raises:
        UnrecognisedError: no list of steps explains what it gave.
        Exception: whatever the layer's own code raises.
    """
    plain, real = run_layer(layer, call.unrotated()), run_layer(layer, call)
    if len(plain.attention) != 1:
        raise UnrecognisedError(f"it calls attention {len(plain.attention)} times")
    return _Reader(plain, real.attention[0], call, layer).read()


def suppose(recipe: LayerRecipe, layer: nn.Module, call: LayerCall) -> LayerRecipe:
    """What a layer computes if it is of a kind with one that is known, which is up to a proof.

    Args: as for :func:`recognise`.

    Raises:
        UnrecognisedError: it cannot be.
    """
    run = run_layer(layer, call)
    if len(run.attention) != 1:
        raise UnrecognisedError(f"it calls attention {len(run.attention)} times")
    refuse(layer, recipe)
    variant = run.attention[0].variant  # a window is longer than what a proof is run on
    steps = (replace(step, variant=variant) if isinstance(step, Attend) else step for step in recipe.steps)
    return replace(recipe, steps=tuple(steps), tables=call.tables)


def refuse(layer: nn.Module, recipe: LayerRecipe) -> None:
    """See whether kernels may stand for a layer's modules.

    Raises:
        UnrecognisedError: a module has hooks (what they do to input and output is seen; what else they do
            would be left out), or has to do with other ranks before what it gives is as wide as the layer.
    """
    kept = tuple(f"{name}." for name in recipe.foreign)
    for name, module in layer.named_modules():
        has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
        if has_hooks and not f"{name}.".startswith(kept):
            raise UnrecognisedError(f"{name or 'the layer'} has hooks")
    for step in recipe.steps:
        for name in modules(step) if isinstance(step, (Project, Gate)) else ():
            module = layer.get_submodule(name)
            if isinstance(module, (GatheredLinear, GatheredConv1D)):
                raise UnrecognisedError(f"{name} gathers its outputs from all ranks")
            is_summed = isinstance(step, Project) and step.is_summed
            if isinstance(module, (RowLinear, RowConv1D)) != is_summed:
                raise UnrecognisedError(f"{name} sums over ranks where it should not, or does not")


@dataclass(slots=True)
class _Reader:
    """Goes through a run in order, and writes down a step for whatever it can explain."""

    run: LayerRun
    rotated: AttentionCall
    call: LayerCall
    layer: nn.Module
    steps: list[Step] = field(default_factory=list)
    known: dict[str, torch.Tensor] = field(default_factory=dict)  # values as wide as the layer
    inner: dict[str, torch.Tensor] = field(default_factory=dict)  # of linears that nothing explains yet
    used: set[str] = field(default_factory=set)  # modules that a step stands for
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def tokens(self) -> int:
        return len(self.run.x)

    def read(self) -> LayerRecipe:
        self.known[INPUT] = self.run.x
        look = look_at_attention(self.run, self.rotated, self.call, self.layer, "qkv", "attended")
        self.used |= look.modules
        attended = self.rows(self.run.attention[0].out)
        has_attended = False
        for noted in self.run.noted:
            if noted.name in self.used:
                continue
            if not noted.is_leaf:
                self.read_composite(noted)
            elif is_linear(noted.module):
                taken = self.rows(noted.source)
                if not has_attended and is_close(taken, attended):
                    source = self.value(self.rows(look.source.source), look.source.name)
                    self.steps += Project("qkv", source, look.pieces), look.attend
                    has_attended = True
                    self.project(noted, "attended")
                else:
                    self.read_linear(noted, taken)
            else:
                self.read_norm(noted)
        if not has_attended:
            raise UnrecognisedError("no linear takes what attention gives")
        output = self.value(self.run.out, "its output")
        if self.inner:
            raise UnrecognisedError(f"{next(iter(self.inner))} feeds nothing that is known")
        steps = tuple(_needed(self.steps, output))
        recipe = LayerRecipe(steps, output, self.run.is_tuple, self.call.tables)
        refuse(self.layer, recipe)
        return recipe

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return rows_of(tensor, self.tokens)
        except ValueError as error:
            raise UnrecognisedError(str(error)) from error

    def value(self, target: torch.Tensor, what: str) -> str:
        """The name of a value, made by a step if it is a sum of known ones."""
        terms = find_sum(target, self.known)
        if terms is None:
            raise UnrecognisedError(f"{what} is no sum of what is known: {', '.join(self.known)}")
        if len(terms) == 1 and terms[0][1] == 1.0:
            return terms[0][0]
        name = f"sum{next(self.numbers)}"
        self.steps.append(Combine(name, terms))
        self.known[name] = target
        return name

    def read_norm(self, noted: Noted) -> None:
        """A norm of a known value; anything else without children (dropout, an activation) explains itself
        by what comes later."""
        if noted.source.shape[-1] != self.run.x.shape[1]:
            return
        look = find_norm(noted.module, noted.source, noted.out)
        if look is None or find_sum(self.rows(noted.source), self.known) is None:
            return
        source = self.value(self.rows(noted.source), noted.name)
        self.steps.append(
            Norm(noted.name, source, noted.name, look.is_centred, look.adds_one, look.has_weight,
                 look.has_bias, look.eps)
        )  # fmt: skip
        self.known[noted.name] = self.rows(noted.out)

    def read_composite(self, noted: Noted) -> None:
        """A part of the layer that makes something new of a known value alone: it goes on doing so."""
        inside = f"{noted.name}."
        if not noted.is_alone or f"{self.run.attention[0].module}.".startswith(inside):
            return
        if noted.source.shape[-1] != self.run.x.shape[1] or noted.out.numel() != self.run.x.numel():
            return
        source, out = self.rows(noted.source), self.rows(noted.out)
        kept = _outside(self.steps, inside)
        names = {INPUT, *(step.out for step in kept)}
        outer = {name: value for name, value in self.known.items() if name in names}
        if find_sum(source, outer) is None or find_sum(out, self.known) is not None:
            return
        self.steps[:], self.known = kept, outer
        self.inner = {name: value for name, value in self.inner.items() if not name.startswith(inside)}
        self.steps.append(Foreign(noted.name, self.value(source, noted.name), noted.name))
        self.known[noted.name] = out

    def read_linear(self, noted: Noted, source: torch.Tensor) -> None:
        """One that leads out of an MLP, or into one."""
        hidden = self.explain_hidden(source)
        if hidden is not None:
            self.project(noted, hidden)
        else:
            self.inner[noted.name] = self.rows(noted.out)

    def project(self, noted: Noted, source: str) -> None:
        """A linear back to the layer's width."""
        out = self.rows(noted.out)
        if out.shape != self.run.x.shape:
            raise UnrecognisedError(f"{noted.name} gives {out.shape[1]} features, not the layer's width")
        is_summed = isinstance(noted.module, (RowLinear, RowConv1D))
        self.steps.append(Project(noted.name, source, (whole(noted),), is_summed=is_summed))
        self.known[noted.name] = out
        self.used.add(noted.name)

    def explain_hidden(self, target: torch.Tensor) -> str | None:
        """The step whose value is what a linear takes, if it is an MLP's inner one."""
        name = f"hidden{next(self.numbers)}"
        by_name = {noted.name: noted for noted in self.run.noted}
        for first, gate in self.inner.items():
            activation = find_activation(gate, target)
            if activation is not None:
                source = self.value(self.rows(by_name[first].source), first)
                self.steps.append(Project(name, source, (whole(by_name[first]),), activation))
                del self.inner[first]
                return name
            found = self.explain_gate(name, by_name, first, gate, target)
            if found:
                return name
        return None

    def explain_gate(
        self, name: str, by_name: dict[str, Noted], first: str, gate: torch.Tensor, target: torch.Tensor
    ) -> bool:
        """Whether ``target`` is a gated product of a linear's result with another's, or of its own halves."""
        width = target.shape[1]
        for second, up in self.inner.items():
            activation = find_gate(gate, up, target) if second != first else None
            if activation is not None:
                source = self.value(self.rows(by_name[first].source), first)
                if not is_close(self.rows(by_name[second].source), self.rows(by_name[first].source)):
                    return False
                pieces = whole(by_name[first]), whole(by_name[second])
                self.steps.append(Gate(name, source, *pieces, activation))
                del self.inner[first], self.inner[second]
                return True
        if gate.shape[1] != 2 * width:
            return False
        order = torch.arange(2 * width)
        for rows in ((order[:width], order[width:]), (order[0::2], order[1::2])):
            for one, other in (rows, rows[::-1]):
                activation = find_gate(gate[:, one], gate[:, other], target)
                if activation is not None:
                    source = self.value(self.rows(by_name[first].source), first)
                    ones = torch.ones(width)
                    self.steps.append(
                        Gate(name, source, Piece(first, one, ones), Piece(first, other, ones), activation)
                    )
                    del self.inner[first]
                    return True
        return False


def _outside(steps: Sequence[Step], inside: str) -> list[Step]:
    """Steps that neither stand for modules inside a part of the layer nor read what such steps make."""
    kept: list[Step] = []
    gone: set[str] = set()
    for step in steps:
        if any(f"{name}.".startswith(inside) for name in modules(step)) or gone.intersection(reads(step)):
            gone.add(step.out)
        else:
            kept.append(step)
    return kept


def _needed(steps: Sequence[Step], output: str) -> list[Step]:
    """Steps that the output depends on, and attention, which keeps keys and values."""
    wanted = {output}
    kept: list[Step] = []
    for step in reversed(steps):
        if step.out in wanted or isinstance(step, Attend):
            wanted.update(reads(step))
            kept.append(step)
    return kept[::-1]


def whole(noted: Noted) -> Piece:
    """All of a linear's features."""
    count = noted.out.shape[-1]
    return Piece(noted.name, torch.arange(count), torch.ones(count))
