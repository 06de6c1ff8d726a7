"""Reshapes to a width that a module's code took from its input, done with the rank's width. Knows no plan.

Code like ``tokens, batch, width = x.size()`` reads the width of the whole model, for a rank's input is
whole, and later shapes the rank's part of the result by it: there is no integer to change. Such a reshape
does not fit its tensor, and fits in exactly one way with the rank's width in place of the whole one. One
class serves the glue check and the sharded model alike.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["repair", "repaired_sizes", "reshape_sizes"]

_RESHAPES = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


def reshape_sizes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The sizes that an operation reshapes its first argument to; None if it is no such operation."""
    if func not in _RESHAPES or not args or not isinstance(args[0], torch.Tensor):
        return None
    sizes = kwargs.get("shape", kwargs.get("size", args[1:]))
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None  # another use of ``view``: a dtype
    return tuple(sizes)


def repaired_sizes(
    shape: Sequence[int], sizes: Sequence[int], old: int, value: int
) -> tuple[int, ...] | None:
    """``sizes`` with one ``old`` replaced by ``value``, so that they hold a tensor of ``shape``.

    Sizes that fit as they are are left alone, and so are those with a ``-1``: that one takes up whatever
    is missing, so that a wrong width would fit by chance. Where several sizes equal ``old``, the one is
    meant that leaves the most dimensions of the tensor where they are; if two do so equally, none.

    Returns:
        None where nothing is to be replaced, or nothing can be.
    """
    elements = math.prod(shape)
    if -1 in sizes or math.prod(sizes) == elements or value == old:
        return None
    candidates = [
        (*sizes[:position], value, *sizes[position + 1 :])
        for position, size in enumerate(sizes)
        if size == old and math.prod(sizes) // old * value == elements
    ]
    kept = [_borders(shape) & _borders(candidate) for candidate in candidates]
    most = max((len(borders) for borders in kept), default=0)
    best = [sizes for sizes, borders in zip(candidates, kept, strict=True) if len(borders) == most]
    return best[0] if len(best) == 1 else None


def _borders(shape: Sequence[int]) -> set[int]:
    """Where, counted in leading elements, one dimension ends and the next begins."""
    return set(itertools.accumulate(shape, lambda product, size: product * size))


class _Repairs(TorchFunctionMode):
    """Does reshapes that do not fit with the rank's width."""

    def __init__(self, widths: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._widths = widths

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sizes = reshape_sizes(func, args, kwargs)
        if sizes is not None:
            repaired = [repaired_sizes(args[0].shape, sizes, old, value) for old, value in self._widths]
            ways = {way for way in repaired if way is not None}
            if len(ways) == 1:
                return func(args[0], ways.pop())
        return func(*args, **kwargs)


def repair(module: nn.Module, widths: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """While ``module``'s forward runs, reshapes to a whole width are done with the rank's.

    The module's class becomes one derived from its own, of the same name.

    Args:
        module: is changed in place.
        widths: (of the whole model, of the rank) pairs.

    Returns:
        a function that undoes it.
    """
    own = type(module)
    pairs = tuple(widths)

    @functools.wraps(own.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Repairs(pairs):
            return own.forward(self, *args, **kwargs)

    namespace = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
    module.__class__ = type(own.__name__, (own,), namespace)

    def undo() -> None:
        module.__class__ = own

    return undo
