"""Whose weight a tensor on meta is, through views, transposes and casts. Knows no operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError

__all__ = ["Owners"]


class Owners:
    """Which module that owns weights is running, and under which names a storage is known to it."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.stack: list[str] = []
        self._names: dict[int, list[str]] = {}
        self._tags: dict[int, int] = {}
        self._keep: list[torch.Tensor] = []  # storages whose identity is in use
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_meta:
                self._names.setdefault(storage_id(parameter), []).append(name)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if buffer.is_meta:
                self._names.setdefault(storage_id(buffer), []).append(name)
        self._handles = list(self._watch())

    def _watch(self) -> Iterator[Any]:
        for name, module in self.modules.items():
            if any(p is not None and p.is_meta for p in module._parameters.values()):
                yield module.register_forward_pre_hook(self._push(name))
                yield module.register_forward_hook(self._pop, always_call=True)

    def _push(self, name: str) -> Callable[..., None]:
        return lambda *_: self.stack.append(name)

    def _pop(self, *_: Any) -> None:
        self.stack.pop()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def inherit(self, source: torch.Tensor, derived: torch.Tensor) -> None:
        """A tensor made of a weight (transposed, cast) still counts as that weight."""
        key = storage_id(derived)
        if key not in self._names and key not in self._tags:
            self._tags[key] = self._tags.get(storage_id(source), storage_id(source))
            self._keep.append(derived)

    def known(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The first that is a weight or was made of one, or else the first."""
        known = (t for t in tensors if storage_id(t) in self._names or storage_id(t) in self._tags)
        return next(known, tensors[0])

    def name(self, weight: torch.Tensor) -> tuple[str, bool]:
        """(name, whether the module that has it under this name is the one running)."""
        key = storage_id(weight)
        names = self._names.get(self._tags.get(key, key))
        if names is None:
            raise PlanError("an operation uses a weight of unknown origin")
        running = self.stack[-1] if self.stack else None
        for name in names:
            if running is not None and name.rpartition(".")[0] == running:
                return name, True
        return names[0], False


def storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
