"""Integers that remember which attribute they come from. Knows no model.

A module's own code reads ``self.num_heads`` and so on, calculates, and hands the result to ``view``,
``split`` or ``reshape``. With an ``int`` subclass in the attribute the operation that fails tells which
attributes it used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.plan.linears import is_splittable
from shoal.plan.random import is_random
from shoal.plan.repair import reshape_sizes
from shoal.plan.types import pattern_of

__all__ = ["IntegerKey", "IntegerTrace", "TracedInt", "integer_places", "integer_slots", "write_integer"]

_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "pow")


@dataclass(frozen=True, slots=True)
class IntegerKey:
    """An attribute that holds ``old`` in every module of a class at places of one pattern."""

    module: str  # pattern
    class_name: str
    attribute: str  # "config.x" for x of the module's config
    old: int


class TracedInt(int):
    """An int that carries the keys it was calculated from."""

    sources: tuple[IntegerKey, ...]

    def __new__(cls, value: int, sources: tuple[IntegerKey, ...] = ()) -> TracedInt:
        traced = super().__new__(cls, value)
        traced.sources = sources
        return traced

    def __reduce__(self) -> tuple[Any, ...]:
        return TracedInt, (int(self), self.sources)

    def __neg__(self) -> TracedInt:
        return TracedInt(-int(self), self.sources)


def _traced(method: str) -> Callable[[Any, Any], Any]:
    plain = getattr(int, method)

    def calculate(left: Any, right: Any) -> Any:
        result = plain(left, right)
        if type(result) is not int:  # NotImplemented, or a float out of a negative power
            return result
        sources = (*getattr(left, "sources", ()), *getattr(right, "sources", ()))
        return TracedInt(result, tuple(dict.fromkeys(sources)))

    return calculate


for _name in _ARITHMETIC:
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(TracedInt, _method, _traced(_method))


class IntegerTrace(TorchFunctionMode):
    """Notes which traced integers reach tensor operations, the latest last, and a reshape that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.failed_reshape: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # shape, sizes wanted
        self.draws: dict[str, tuple[IntegerKey, ...]] = {}  # by random operations, so many numbers
        self._seen: dict[IntegerKey, int] = {}

    def suspects(self) -> list[IntegerKey]:
        """Keys in the order in which they were last used, latest first."""
        return sorted(self._seen, key=lambda key: -self._seen[key])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sources = list(dict.fromkeys(_sources((args, tuple(kwargs.values())))))
        self.num_operations += 1
        for key in sources:
            self._seen[key] = self.num_operations
        if sources and is_random(func, kwargs):
            self.draws[func.__name__] = tuple(sources)
        try:
            return func(*args, **kwargs)
        except Exception:
            sizes = reshape_sizes(func, args, kwargs)
            if sizes is not None:
                self.failed_reshape = tuple(args[0].shape), sizes
            raise


def _sources(values: Any) -> Iterator[IntegerKey]:
    for value in values:
        if type(value) is TracedInt:
            yield from value.sources
        elif isinstance(value, slice):
            yield from _sources((value.start, value.stop, value.step))
        elif isinstance(value, (tuple, list)):
            yield from _sources(value)


def integer_places(model: nn.Module, home: str) -> Iterator[tuple[nn.Module, IntegerKey]]:
    """Every integer of two or more in the modules of a home (a pattern) and in their configs."""
    for name, module in model.named_modules():
        pattern = pattern_of(name)
        if not (pattern == home or pattern.startswith(f"{home}.")) or is_splittable(module):
            continue
        yield from ((module, key) for key in _integers(module, pattern))


def integer_slots(model: nn.Module) -> Iterator[IntegerKey]:
    """The keys of all integers in a model, as it is now: forward code may make further modules."""
    for name, module in model.named_modules():
        yield from _integers(module, pattern_of(name))


def _integers(module: nn.Module, pattern: str) -> Iterator[IntegerKey]:
    config = vars(module).get("config")
    for prefix, holder in (("", module), ("config.", config)):
        for attribute, value in list(vars(holder).items()) if holder is not None else ():
            if type(value) in (int, TracedInt) and value >= 2 and not attribute.startswith("_"):
                yield IntegerKey(pattern, type(module).__name__, prefix + attribute, int(value))


def write_integer(module: nn.Module, attribute: str, value: int) -> None:
    """Set an attribute of a module or of its config, which is copied so that others don't notice."""
    if attribute.startswith("config."):
        module.config = copy.copy(module.config)
        vars(module.config)[attribute.removeprefix("config.")] = value
    else:
        setattr(module, attribute, value)
