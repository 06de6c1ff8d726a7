"""The tensors of a call, on the rank that the program sees: which are parts, which the others know.

Before a call, parts become ordinary tensors in place; after it, what the model keeps (in a cache, or in an
output field that it takes back as an argument) becomes parts, and other results are remembered by identity.
Knows no process.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from shoal.errors import UnsupportedError, UsageError
from shoal.parallel.packing import Known
from shoal.parallel.parts import Handle, Journal, Part, make_part, plain
from shoal.parallel.walk import walk, walk_call

__all__ = ["CallTensors", "caches_in", "count_tensors", "empty_caches", "refuse_foreign"]


@dataclass
class CallTensors:
    """One call's tensors on rank 0."""

    journal: Journal
    known: Known
    _plain: dict[int, tuple[weakref.ref[torch.Tensor], Handle]] = field(default_factory=dict)
    _given: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def check(self, value: Any) -> None:
        """Refuse parts that are another model's, or a closed one's.

        Raises:
            UsageError: there is one.
        """

        def visit(tensor: torch.Tensor, is_state: bool) -> torch.Tensor:
            if isinstance(tensor, Part) and tensor.handle.journal is not self.journal:
                raise UsageError(
                    "a cache of another parallel model, or of one that was closed, cannot be used; "
                    "make a new one"
                )
            return tensor

        walk(value, visit)

    def open(self, value: Any) -> Any:
        """``value`` with parts as ordinary tensors, in place; :meth:`restore` or :meth:`keep` undoes it."""

        def visit(tensor: torch.Tensor, is_state: bool) -> torch.Tensor:
            if not isinstance(tensor, Part):
                self._given[id(tensor)] = (tensor, _version(tensor))
                return tensor
            ordinary = plain(tensor)
            self._plain[id(ordinary)] = (weakref.ref(ordinary), tensor.handle)
            return ordinary

        return walk(value, visit)

    def exclusive(self) -> list[int]:
        """Numbers of the parts that nobody else holds: when the model replaces them, they can go at once."""
        # Held by the entry, and by the call to getrefcount.
        return [entry[1].number for entry in self._plain.values() if sys.getrefcount(entry[1]) <= 2]

    def restore(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a call that failed: parts that are still there become parts again."""

        def visit(tensor: torch.Tensor, is_state: bool) -> torch.Tensor:
            part = self._part_again(tensor)
            return tensor if part is None else part

        walk((args, kwargs), visit)

    def keep(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, state_names: frozenset[str]
    ) -> tuple[Any, list[tuple[int, int]], int]:
        """After a call: name what the ranks are to keep.

        Returns:
            the output; (position in the walk, number) of each tensor to keep; how many tensors were met.
        """
        bound: list[tuple[int, int]] = []
        count = 0

        def visit(tensor: torch.Tensor, is_state: bool) -> torch.Tensor:
            nonlocal count
            position, count = count, count + 1
            part = self._part_again(tensor)
            if part is not None:
                return part
            if is_state and self._is_state(tensor):
                handle = self.journal.new_handle()
                bound.append((position, handle.number))
                return make_part(tensor, handle)
            if self.known.number_of(tensor) is None and not self._is_given(tensor):
                number = self.known.add(tensor)
                if number is not None:
                    bound.append((position, number))
            return tensor

        return walk_call(args, kwargs, output, visit, state_names), bound, count

    def _part_again(self, tensor: torch.Tensor) -> Part | None:
        """The part that an ordinary tensor was before the call."""
        entry = self._plain.get(id(tensor))
        return make_part(tensor, entry[1]) if entry is not None and entry[0]() is tensor else None

    def _is_given(self, tensor: torch.Tensor) -> bool:
        """Whether the caller brought the tensor, and the model left it as it was."""
        entry = self._given.get(id(tensor))
        return entry is not None and entry[0] is tensor and 0 <= entry[1] == _version(tensor)

    def _is_state(self, tensor: torch.Tensor) -> bool:
        """Whether ranks may differ in it: not in what was given and left alone, nor in a single count."""
        if self._is_given(tensor) or (tensor.numel() <= 1 and not tensor.is_floating_point()):
            return False
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"the model keeps a {type(tensor).__name__} from call to call, which cannot be shared with "
                "other ranks yet"
            )
        return True


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)


def count_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, state_names: frozenset[str]
) -> list[torch.Tensor]:
    """The tensors that :meth:`CallTensors.keep` meets, on another rank, in the same order."""
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor, is_state: bool) -> torch.Tensor:
        found.append(tensor)
        return tensor

    walk_call(args, kwargs, output, visit, state_names)
    return found


def empty_caches(value: Any) -> None:
    """Have caches that were allocated for the whole model, and hold nothing yet, allocate anew at first use.

    transformers allocates a static cache by the config's head counts; a rank has fewer.
    """
    for layer in _cache_layers(value):
        keys = getattr(layer, "keys", None)
        is_whole = isinstance(keys, torch.Tensor) and not isinstance(keys, Part)
        if is_whole and getattr(layer, "is_initialized", False) and not int(layer.get_seq_length()):
            layer.keys = layer.values = None
            layer.is_initialized = False


def refuse_foreign(value: Any, is_ours: Callable[[torch.Tensor], bool]) -> None:
    """Refuse caches that a whole model has filled.

    Raises:
        UsageError: a cache holds keys and values of which ``is_ours`` says no.
    """

    def visit(tensor: torch.Tensor, is_state: bool) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.numel() and not is_ours(tensor):
            raise UsageError(
                "the cache was filled before the model was parallelized, or copied in a way that cannot be "
                "followed: its keys and values are the whole model's; make a new cache and run the prompt "
                "again"
            )
        return tensor

    for layer in _cache_layers(value):
        walk(layer, visit)


def _cache_layers(value: Any) -> list[Any]:
    """The layers of every transformers cache in a call's arguments."""
    return [layer for cache in caches_in(value) for layer in getattr(cache, "layers", None) or ()]


def caches_in(value: Any) -> list[Cache]:
    """Every transformers cache in a call's arguments or results, those within caches too."""
    if isinstance(value, Cache):
        return [value, *caches_in([entry for entry in vars(value).values() if isinstance(entry, Cache)])]
    if isinstance(value, dict):
        value = list(value.values())
    return [cache for item in value for cache in caches_in(item)] if isinstance(value, (list, tuple)) else []
