"""Whose weight a tensor on meta is, and which part of it, through views, casts and look-ups. Knows no
product and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.features import Origin

__all__ = ["Owners"]

# The result's elements are the argument's, each by itself: what holds for a part holds for the part.
_ELEMENTWISE = {
    "to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone", "detach",
    "mul", "__mul__", "__rmul__", "div", "__truediv__", "neg", "__neg__",
}  # fmt: skip
_LOOK_UPS = {"__getitem__", "index_select"}


class Owners:
    """Which module is running, and which names and which part of which weight a storage is known by."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.stack: list[str] = []
        self.entangled: set[str] = set()  # weights made one with others before they meet a real tensor
        self.users: dict[str, set[str]] = {}  # weight -> modules whose code took hold of it
        self._names: dict[int, list[str]] = {}
        self._whole: dict[int, torch.Tensor] = {}
        self._tags: dict[int, tuple[int, torch.Tensor, Origin | None]] = {}  # source, base, where it lies
        tensors = (*_named(model, "parameters"), *_named(model, "buffers"))
        self._weights = dict.fromkeys(name.rpartition(".")[0] for name, _ in tensors)
        for name, tensor in tensors:
            if tensor.is_meta:
                self._names.setdefault(storage_id(tensor), []).append(name)
                self._whole.setdefault(storage_id(tensor), tensor)
        self._handles = list(self._watch())

    def _watch(self) -> Iterator[Any]:
        """Hooks on what has weights in it; nothing else takes hold of any."""
        for name in _holders(self._weights):
            module = self.modules[name]
            yield module.register_forward_pre_hook(self._push(name))
            yield module.register_forward_hook(self._pop(name), always_call=True)

    def _push(self, name: str) -> Callable[..., None]:
        return lambda *_: self.stack.append(name)

    def _pop(self, name: str) -> Callable[..., None]:
        def pop(*_: Any) -> None:
            if self.stack and self.stack[-1] == name:  # not pushed if another's hook raised first
                self.stack.pop()

        return pop

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def running(self) -> str:
        """The innermost module whose forward is running."""
        return self.stack[-1] if self.stack else ""

    def derive(self, function: str, sources: Sequence[torch.Tensor], derived: torch.Tensor) -> None:
        """Note what was made of weights alone: a view, a cast, or something else of them."""
        source = self.known(sources)
        owners = {self._root(storage_id(entry)) for entry in sources} & self._names.keys()
        if owners and self.running:
            for root in owners:
                self.users.setdefault(self._names[root][0], set()).add(self.running)
        if len(owners) > 1:
            self.entangled |= {name for root in owners for name in self._names[root]}
        key = storage_id(derived)
        if key in self._names or key in self._tags:
            return  # a view
        is_alike = function in _ELEMENTWISE and len(sources) == 1 and derived.shape == source.shape
        self.tag(source, derived, self.origin(source) if is_alike else None)

    def look_up(self, function: str, weight: torch.Tensor, args: Sequence[Any]) -> torch.Tensor | None:
        """Rows of a stack of matrices, chosen by a tensor of numbers: still a weight, with other rows.

        None where it is no such thing: rows of a table are values that the model computes with.
        """
        index = args[-1] if len(args) > 1 else None
        along_first = function == "__getitem__" or (len(args) == 3 and args[1] == 0)
        if function not in _LOOK_UPS or not along_first or weight.dim() < 3 or args[0] is not weight:
            return None
        if not isinstance(index, torch.Tensor) or index.is_floating_point() or index.dtype is torch.bool:
            return None
        with torch._C.DisableTorchFunction():
            chosen = torch.empty((*index.shape, *weight.shape[1:]), dtype=weight.dtype, device="meta")
        whole = self.origin(weight)
        strides = (0,) * index.dim() + (whole.strides[1:] if whole else ())
        self.tag(weight, chosen, Origin(whole.shape, whole.offset, strides) if whole else None)
        return chosen

    def tag(self, source: torch.Tensor, derived: torch.Tensor, origin: Origin | None) -> None:
        """Count ``derived``, a storage of its own, as the weight that ``source`` is."""
        self._tags[storage_id(derived)] = (self._root(storage_id(source)), derived, origin)

    def _root(self, key: int) -> int:
        return self._tags[key][0] if key in self._tags else key

    def known(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The first that is a weight or was made of one, or else the first."""
        known = (t for t in tensors if storage_id(t) in self._names or storage_id(t) in self._tags)
        return next(known, tensors[0])

    def owners(self, tensors: Sequence[torch.Tensor]) -> set[str]:
        """The weights that these are or were made of, each by one of its names."""
        roots = {self._root(storage_id(tensor)) for tensor in tensors}
        return {self._names[root][0] for root in roots if root in self._names}

    def name(self, weight: torch.Tensor) -> tuple[str, bool]:
        """(name, whether the module that has it under this name is the one running)."""
        names = self._names.get(self._root(storage_id(weight)))
        if names is None:
            raise PlanError("an operation uses a weight of unknown origin")
        for name in names:
            if self.stack and name.rpartition(".")[0] == self.running:
                return name, True
        return names[0], False

    def origin(self, tensor: torch.Tensor) -> Origin | None:
        """Where in its parameter the elements of a tensor lie; None if they are no part of it as they are."""
        key = storage_id(tensor)
        if key in self._tags:
            _, base, origin = self._tags[key]
            return None if origin is None else _composed(tensor, base, origin)
        whole = self._whole.get(key)
        if whole is None or not whole.is_contiguous():
            return None
        offset = int(tensor.storage_offset()) - int(whole.storage_offset())
        return Origin(tuple(whole.shape), offset, tuple(tensor.stride()))


def _holders(owners: Iterable[str]) -> list[str]:
    """The owners and all around them, by name."""
    found: dict[str, None] = {}
    for name in owners:
        while name and name not in found:
            found[name] = None
            name = name.rpartition(".")[0]
    return ["", *found]


def _named(model: nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    named = model.named_parameters if kind == "parameters" else model.named_buffers
    yield from named(remove_duplicate=False)


def _composed(tensor: torch.Tensor, base: torch.Tensor, origin: Origin) -> Origin | None:
    """Where the elements of a view of ``base`` lie, from where those of ``base`` do."""
    if base.stride() == origin.strides:
        return Origin(origin.shape, origin.offset + int(tensor.storage_offset()), tuple(tensor.stride()))
    layout = zip(base.shape, base.stride(), origin.strides, strict=True)
    there = {step: to for size, step, to in layout if size > 1}
    strides = [
        there.get(step) if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    if any(step is None for step in strides):
        return None
    offset, rest = origin.offset, int(tensor.storage_offset())
    for step, to in sorted(there.items(), reverse=True):
        number, rest = divmod(rest, step)
        offset += number * to
    return Origin(origin.shape, offset, tuple(step for step in strides if step is not None))


def storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
