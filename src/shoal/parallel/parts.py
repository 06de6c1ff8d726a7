"""Tensors of which every rank holds its own, and the journal of what is done to them between calls.

What a model keeps from one call to the next (a cache's keys and values) differs from rank to rank. Rank 0's
are seen by the program; each is a :class:`Part`, which knows the number the other ranks know theirs by.
Whatever is done to a part outside the model (a beam reordered, a cache cropped, copied or zeroed) is done
there and noted; the others do the same, in the same order, before the next call. So no kind of cache need be
known. Knows no process and no model.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.errors import UsageError

__all__ = ["Drop", "Handle", "Journal", "Operation", "Part", "Ref", "make_part", "plain", "replay"]

_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
# What these give leaves the ranks' world: a file, a list, text.
_OUTWARD = frozenset({"__reduce_ex__", "__repr__", "__format__", "numpy", "tolist", "item", "__array__"})
_TIDY_FROM = 1024  # entries


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor by the number that every rank knows its own under."""

    number: int


@dataclass(frozen=True, slots=True)
class Operation:
    """A torch function that every rank is to call. Parts among the arguments are :class:`Ref`."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: frozenset[int]
    outputs: tuple[int, ...]  # numbers for the tensors it gives, in order
    is_in_place: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody holds the tensor any more."""

    number: int


class Journal:
    """What the other ranks have yet to hear, in order. One belongs to one group; any thread may write."""

    def __init__(self) -> None:
        self._entries: list[Operation | Drop] = []
        self._numbers = itertools.count(1)
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._lock = threading.RLock()  # a collection may drop a handle while an entry is written
        self._limit = _TIDY_FROM
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def new_handle(self) -> Handle:
        """A number for a tensor, not used before."""
        return Handle(next(self._numbers), self)

    def drop(self, number: int) -> None:
        """Note that rank 0 no longer has the tensor."""
        if not self.is_closed:
            with self._lock:
                self._entries.append(Drop(number))

    def note(self, operation: Operation) -> None:
        """Note what rank 0 has done."""
        with self._lock:
            self._entries.append(operation)
            if len(self._entries) > self._limit:  # somebody computes with a cache: most came and went
                self._entries = _wanted(self._entries)
                self._limit = max(_TIDY_FROM, 2 * len(self._entries))

    def frozen(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of an argument as it is now; one copy serves as long as the original stays unchanged."""
        version = -1 if tensor.is_inference() else tensor._version
        kept = self._copies.get(id(tensor))
        if kept is not None and kept[0] is tensor and version >= 0 and kept[1] == version:
            return kept[2]
        copy = tensor.detach().clone()
        self._copies[id(tensor)] = (tensor, version, copy)
        return copy

    def take(self) -> list[Operation | Drop]:
        """All entries that matter, and forget them. What came of tensors already dropped is left out."""
        with self._lock:
            entries, self._entries, self._copies = self._entries, [], {}
        return _wanted(entries)

    def close(self) -> None:
        """Nobody listens any more."""
        self.is_closed = True
        self._entries, self._copies = [], {}


def _wanted(entries: Sequence[Operation | Drop]) -> list[Operation | Drop]:
    """The entries worth telling: not what only led to tensors that are dropped."""
    dropped = {entry.number for entry in entries if isinstance(entry, Drop)}
    made = {number for entry in entries if isinstance(entry, Operation) for number in entry.outputs}
    needed: set[int] = set()
    kept: list[Operation | Drop] = []
    for entry in reversed(entries):
        if isinstance(entry, Operation):
            if entry.is_in_place or any(n in needed or n not in dropped for n in entry.outputs):
                needed |= entry.inputs | set(entry.outputs)
                kept.append(entry)
        else:
            kept.append(entry)
    # A tensor that is made and dropped in vain is not spoken of at all.
    is_idle = {number for number in made if number not in needed}
    return [entry for entry in reversed(kept) if not isinstance(entry, Drop) or entry.number not in is_idle]


class Handle:
    """The number of a tensor. When nobody holds the handle any more, the ranks let their tensors go."""

    __slots__ = ("__weakref__", "journal", "number")

    def __init__(self, number: int, journal: Journal) -> None:
        self.number = number
        self.journal = journal

    def __del__(self) -> None:
        self.journal.drop(self.number)


class Part(torch.Tensor):
    """Rank 0's own of a tensor that every rank has its own of."""

    handle: Handle

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.__deepcopy__:
            return _deep_copy(args[0], args[1])
        if name == "__set__" and func.__self__ is torch.Tensor.data:
            raise UsageError("the memory of a parallel model's cache cannot be exchanged; make a new cache")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _OUTWARD:
                return func(*(plain(value) if isinstance(value, Part) else value for value in args), **kwargs)
            # Arguments as they are before it: it may change them.
            told = _Told()
            told_args, told_kwargs = told.values(args), told.values(kwargs)
            result = func(*args, **kwargs)
            return _note(func, name, told, told_args, told_kwargs, result)


class _Told:
    """Arguments as the other ranks are to have them."""

    def __init__(self) -> None:
        self.inputs: set[int] = set()
        self.journals: list[Journal] = []
        self.parts: list[Part] = []

    def values(self, value: Any) -> Any:
        if isinstance(value, Part):
            handle = value.handle
            self.inputs.add(handle.number)
            self.parts.append(value)
            if handle.journal not in self.journals:
                self.journals.append(handle.journal)
            return Ref(handle.number)
        if type(value) in (tuple, list):
            return type(value)([self.values(item) for item in value])
        if type(value) is dict:
            return {key: self.values(item) for key, item in value.items()}
        return value


def _note(func: Any, name: str, told: _Told, args: Any, kwargs: Any, result: Any) -> Any:
    """Journal what was done, and make parts of what came of it."""
    if len(told.journals) != 1 or told.journals[0].is_closed:
        return result
    journal = told.journals[0]
    is_in_place = name in _IN_PLACE or any(result is part for part in told.parts)
    tensors = [] if is_in_place else list(_tensors(result))
    if not (tensors or is_in_place):
        return result  # a size, a number, text
    made = {id(tensor): make_part(tensor, journal.new_handle()) for tensor in tensors}
    outputs = tuple(made[id(tensor)].handle.number for tensor in tensors)
    freeze = journal.frozen
    journal.note(
        Operation(
            func, _frozen(args, freeze), _frozen(kwargs, freeze), frozenset(told.inputs), outputs, is_in_place
        )
    )
    return _replaced(result, made)


def _frozen(value: Any, freeze: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with its tensors copied: they may change before the others hear of them."""
    if isinstance(value, torch.Tensor):
        return freeze(value)
    if type(value) in (tuple, list):
        return type(value)([_frozen(item, freeze) for item in value])
    if type(value) is dict:
        return {key: _frozen(item, freeze) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _replaced(value: Any, made: Mapping[int, Part]) -> Any:
    if isinstance(value, torch.Tensor):
        return made.get(id(value), value)
    if isinstance(value, (tuple, list)):
        items = [_replaced(item, made) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _deep_copy(part: Part, memo: dict[int, Any]) -> Any:
    if id(part) not in memo:
        memo[id(part)] = torch.Tensor.clone(part)
    return memo[id(part)]


def make_part(tensor: torch.Tensor, handle: Handle) -> Part:
    """``tensor`` (its memory) as a part under ``handle``'s number."""
    with torch._C.DisableTorchFunctionSubclass():
        part = tensor.as_subclass(Part)
    part.handle = handle
    return part


def plain(part: Part) -> torch.Tensor:
    """A part's memory as an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return part.as_subclass(torch.Tensor)


@torch.no_grad()
def replay(entries: Sequence[Operation | Drop], store: dict[int, torch.Tensor]) -> None:
    """Do on another rank what rank 0 did.

    Args:
        store: this rank's tensors by number; changed.
    """
    for entry in entries:
        if isinstance(entry, Drop):
            store.pop(entry.number, None)
            continue
        result = entry.function(*_resolved(entry.args, store), **_resolved(entry.kwargs, store))
        if not entry.is_in_place:
            store.update(zip(entry.outputs, _tensors(result), strict=True))


def _resolved(value: Any, store: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return store[value.number]
    if type(value) in (tuple, list):
        return type(value)([_resolved(item, store) for item in value])
    if type(value) is dict:
        return {key: _resolved(item, store) for key, item in value.items()}
    return value
