"""Cutting tensors, and the arguments modules are called with, into a rank's part. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.types import ArgumentSlice, Range, total

__all__ = ["argument_hook", "cut_argument", "cut_ranges"]


def cut_ranges(tensor: torch.Tensor, dim: int, ranges: Sequence[Range]) -> torch.Tensor:
    """The given ranges of ``dim``, one after the other, in memory of their own."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0).clone()


def cut_argument(value: torch.Tensor, argument: ArgumentSlice, rank: int) -> torch.Tensor:
    """The rank's part of every repetition of an argument's pattern along its dimension.

    Raises:
        PlanError: the dimension is not a whole number of repetitions.
    """
    repetitions, rest = divmod(value.shape[argument.dim], argument.period)
    if rest:
        raise PlanError(
            f"{argument.argument}: {value.shape[argument.dim]} is no multiple of {argument.period}"
        )
    own = argument.ranges[rank]
    if total(own) == argument.period:
        return value
    offsets = range(0, repetitions * argument.period, argument.period)
    return cut_ranges(
        value, argument.dim, [(base + start, base + stop) for base in offsets for start, stop in own]
    )


@dataclass(frozen=True, slots=True)
class _ArgumentCut:
    """The hook; a class and not a closure, so that a module that has it can be pickled."""

    argument: ArgumentSlice
    rank: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self.argument.argument
        position = int(name[1:]) if name.startswith("#") else None
        if position is None:
            value = kwargs.get(name)
            if isinstance(value, torch.Tensor):
                kwargs = {**kwargs, name: cut_argument(value, self.argument, self.rank)}
        elif position < len(args) and isinstance(args[position], torch.Tensor):
            own = cut_argument(args[position], self.argument, self.rank)
            args = (*args[:position], own, *args[position + 1 :])
        return args, kwargs


def argument_hook(argument: ArgumentSlice, rank: int) -> Any:
    """A forward pre-hook (with keyword arguments) that hands a module the rank's part of an argument."""
    return _ArgumentCut(argument, rank)
