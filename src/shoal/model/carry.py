"""What a model hands from one call to the next, as tensors: found by looking at a few runs, taken out, put
back. Knows no scheduler, no slot and no kind of cache by name, but transformers' keys and values.

A model's state may be a ``Cache``, a list of tensors, an object of its own, or attributes of its modules. All
that is supposed is that its tensors have a dimension for the rows of a batch. *Keys and values*, which grow
with every token, are set apart: they live in pages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

__all__ = [
    "Carry",
    "Seen",
    "StateSpec",
    "attributes_of",
    "changed_attributes",
    "keys_and_values",
    "look",
    "restore",
]

_NOT_STATE = ("_modules", "_parameters", "_buffers")


class StateSpec(NamedTuple):
    """One tensor of a sequence's state."""

    shape: tuple[int, ...]  # without the dimension of the batch
    dtype: torch.dtype
    batch_dim: int

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def keys_and_values(carried: Mapping[str, Any]) -> dict[int, Any]:
    """Layers of a transformers cache among ``carried`` that hold keys and values, by their number. A rank may
    have no head of them.
    """
    caches = [value for value in carried.values() if isinstance(value, Cache)]
    layers = enumerate(caches[0].layers) if caches else ()
    return {
        index: layer
        for index, layer in layers
        if isinstance(keys := getattr(layer, "keys", None), torch.Tensor)
        and keys.dim() == 4
        and keys.shape[2]
    }


@dataclass(slots=True)
class Carry:
    """A model's state: a template of what is handed over, and which of its tensors are whose.

    ``take`` and ``put`` speak of the state's tensors in one order, that of ``specs``.
    """

    module: PreTrainedModel
    template: dict[str, Any]  # by argument; its keys and values are gone
    attributes: list[tuple[nn.Module, str]]  # that hold a tensor of the state each; the last of ``specs``
    places: list[int]  # among all tensors, which are the state's
    specs: list[StateSpec]

    def forget(self, num_rows: int, device: torch.device) -> None:
        """The next call begins so many new sequences: what hangs on modules is zero.

        Not what it was before any call: code that makes its own zeros may not know a rank's share.
        """
        for spec, (module, name) in zip(self.specs[-len(self.attributes) :], self.attributes, strict=False):
            zeros = torch.zeros(num_rows, *spec.shape, dtype=spec.dtype, device=device)
            setattr(module, name, zeros.movedim(0, spec.batch_dim))

    def put(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Arguments for a call that goes on from a state, and attributes set to it.

        Args:
            tensors: [B, *shape] each.
        """
        found = list(_tensors(self.template))
        replaced: dict[int, Any] = {id(self.module.config): self.module.config}
        for place, spec, tensor in zip(self.places, self.specs, tensors, strict=True):
            own = tensor.movedim(0, spec.batch_dim)
            if place < len(found):
                replaced[id(found[place])] = own
            else:
                setattr(*self.attributes[place - len(found)], own)
        made: dict[str, Any] = copy.deepcopy(self.template, replaced)
        return made

    def take(self, carried: Mapping[str, Any]) -> list[torch.Tensor]:
        """The state's tensors, [B, *shape] each, after a call that left ``carried``.

        Raises:
            RuntimeError: it left something else than the template shows.
        """
        for layer in keys_and_values(carried).values():
            layer.keys = layer.values = None
        all_tensors = [*_tensors(carried), *(getattr(module, name) for module, name in self.attributes)]
        wanted = len(list(_tensors(self.template))) + len(self.attributes)
        if len(all_tensors) != wanted:
            raise RuntimeError(f"the model keeps {len(all_tensors)} tensors where it kept {wanted} before")
        pairs = zip(self.places, self.specs, strict=True)
        return [all_tensors[place].movedim(spec.batch_dim, 0) for place, spec in pairs]


class Seen(NamedTuple):
    """What one call left."""

    carried: dict[str, Any]
    attributes: dict[tuple[nn.Module, str], torch.Tensor]


def look(module: PreTrainedModel, runs: Sequence[Seen]) -> Carry:
    """Find the state by what changes with the batch.

    Args:
        runs: of one sequence, of two equally long, and of one that is longer. Their keys and values are gone.

    Raises:
        TypeError: there is no state, or something besides keys and values that grows with the tokens.
    """
    single, double, longer = (list(_tensors(run.carried)) for run in runs)
    first, second, third = (run.attributes for run in runs)
    stateful = [key for key in first if key in second and _varying(first[key], second[key])]
    pairs = [*zip(single, double, longer, strict=True), *((first[k], second[k], third[k]) for k in stateful)]
    places, specs = [], []
    for place, (one, two, long) in enumerate(pairs):
        dims = _varying(one, two)
        if _varying(one, long):
            raise TypeError("it keeps something besides keys and values that grows with every token")
        if not dims:
            continue
        if len(dims) > 1 or one.shape[dims[0]] * 2 != two.shape[dims[0]] or one.shape[dims[0]] != 1:
            raise TypeError("it keeps something whose rows cannot be told apart")
        shape = list(one.shape)
        del shape[dims[0]]
        places.append(place)
        specs.append(StateSpec(tuple(shape), one.dtype, dims[0]))
    if not specs:
        raise TypeError("it keeps no state")
    return Carry(module, runs[0].carried, stateful, places, specs)


def attributes_of(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Every attribute of every module that is no parameter, buffer or module."""
    return {
        (owner, name): value
        for owner in module.modules()
        for name, value in vars(owner).items()
        if name not in _NOT_STATE
    }


def changed_attributes(
    module: nn.Module, initial: Mapping[tuple[nn.Module, str], Any]
) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """Those that hold another tensor than before."""
    return {
        key: value
        for key, value in attributes_of(module).items()
        if isinstance(value, torch.Tensor) and value is not initial.get(key)
    }


def restore(changed: Iterable[tuple[nn.Module, str]], initial: Mapping[tuple[nn.Module, str], Any]) -> None:
    """Set attributes back to what they were."""
    for owner, name in changed:
        if (owner, name) in initial:
            setattr(owner, name, initial[owner, name])
        else:
            delattr(owner, name)


def _varying(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    if one.dim() != other.dim():
        raise TypeError("it keeps something whose dimensions change in number")
    return [dim for dim in range(one.dim()) if one.shape[dim] != other.shape[dim]]


def _tensors(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor that a value holds, in an order of its structure."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, (nn.Module, PreTrainedConfig, type)):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: Sequence[Any] = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = value
    else:
        inner = list(vars(value).values()) if hasattr(value, "__dict__") else ()
    for item in inner:
        yield from _tensors(item, seen)
