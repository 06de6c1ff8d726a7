"""What a forward pass depends on besides its arguments: random states, autocast, the model's settings, hooks.
Knows no process.

Rank 0's are the program's to set; the other ranks are told what has changed since they last heard.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.device.base import Device

__all__ = ["HookChange", "Hooks", "RandomState", "RemoteHooks", "Settings", "autocast", "autocast_state"]

_PRE, _POST = "_forward_pre_hooks", "_forward_hooks"
_KINDS = (_PRE, _POST)
_Place = tuple[str, str, int]  # module, kind, key


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random states of one process."""

    torch_cpu: bytes
    device: bytes  # of the device computed on, empty for a CPU
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    @classmethod
    def now(cls, device: Device) -> RandomState:
        """This process's."""
        numpy = np.random.get_state()
        assert isinstance(numpy, tuple)
        name, keys, *rest = numpy
        own = device.random_state()
        return cls(
            torch.get_rng_state().numpy().tobytes(),
            b"" if own is None else own.numpy().tobytes(),
            (name, np.asarray(keys).tobytes(), *rest),
            random.getstate(),
        )

    def apply(self, device: Device) -> None:
        """Make it this process's."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch_cpu), dtype=torch.uint8))
        if self.device:
            device.set_random_state(torch.frombuffer(bytearray(self.device), dtype=torch.uint8))
        name, keys, *rest = self.numpy
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
        random.setstate(self.python)


def autocast_state(device: torch.device) -> dict[str, Any]:
    """What torch computes in, as the caller has set it: default dtype, and autocast by device type."""
    kinds = {"cpu", device.type}
    cast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    return {"default": torch.get_default_dtype(), "cast": cast}


@contextlib.contextmanager
def autocast(state: Mapping[str, Any]) -> Iterator[None]:
    """Compute as rank 0's caller does (see :func:`autocast_state`)."""
    torch.set_default_dtype(state["default"])
    with contextlib.ExitStack() as stack:
        for kind, dtype in state["cast"].items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


class Settings:
    """The model's config and those within it: what the program has changed since the others last heard.

    Configs are looked at one level deep: a value that is itself changed in place (a list) is not seen.
    """

    def __init__(self, config: Any) -> None:
        self._configs = {"": config}
        for name, value in vars(config).items():
            if hasattr(value, "to_dict") and hasattr(value, "__dict__"):
                self._configs[name] = value
        self._last: dict[str, dict[str, Any]] = {}
        self.note()

    def note(self) -> None:
        """The others know what there is now."""
        self._last = {name: dict(vars(own)) for name, own in self._configs.items()}

    def changes(self) -> dict[str, dict[str, Any]]:
        """By config's name (empty: the model's own), the attributes that have other values now."""
        found: dict[str, dict[str, Any]] = {}
        for name, config in self._configs.items():
            last = self._last[name]
            changed = {
                key: value
                for key, value in vars(config).items()
                if (key not in last or not _is_same(last[key], value)) and key not in self._configs
            }
            if changed:
                found[name] = changed
        return found

    @staticmethod
    def apply(config: Any, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Make another rank's config follow."""
        for name, changed in changes.items():
            vars(getattr(config, name) if name else config).update(changed)


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(new, (int, float, str)) and old == new)


@dataclass(frozen=True, slots=True)
class HookChange:
    """A forward hook that was added to a module, or (``hook`` None) removed."""

    module: str
    kind: str
    key: int
    hook: Any
    flags: tuple[bool, bool]  # with keyword arguments, always called


class Hooks:
    """The program's forward hooks on a model's modules. They run on every rank, each on a copy of its own.

    Args:
        model: is not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, weakref.ref(module)) for name, module in model.named_modules()]
        self._last: list[_Place] = []
        self.note()

    def note(self) -> None:
        """The others know what there is now (in the middle of a call transformers adds some everywhere)."""
        self._last = [place for place, _ in self._present()]

    def changes(self) -> list[HookChange]:
        """What was added and removed since the last note."""
        now = self._present()
        if [place for place, _ in now] == self._last:
            return []
        before, after = set(self._last), {place for place, _ in now}
        gone = [HookChange(*place, None, (False, False)) for place in self._last if place not in after]
        return gone + [_added(place, module) for place, module in now if place not in before]

    def _present(self) -> list[tuple[_Place, nn.Module]]:
        found: list[tuple[_Place, nn.Module]] = []
        for name, ref in self._modules:
            module = ref()
            if module is not None and (module._forward_hooks or module._forward_pre_hooks):
                found += [((name, kind, key), module) for kind in _KINDS for key in getattr(module, kind)]
        return found


def _added(place: _Place, module: nn.Module) -> HookChange:
    name, kind, key = place
    hook = getattr(module, kind)[key]
    with_kwargs = key in getattr(module, f"{kind}_with_kwargs")
    always = kind == _POST and key in module._forward_hooks_always_called
    return HookChange(name, kind, key, hook, (with_kwargs, always))


class RemoteHooks:
    """Another rank's side: hooks by rank 0's keys."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._handles: dict[_Place, RemovableHandle] = {}

    def apply(self, changes: Sequence[HookChange]) -> None:
        """Add and remove what rank 0 has."""
        for change in changes:
            module, place = self._modules[change.module], (change.module, change.kind, change.key)
            if change.hook is None:
                if place in self._handles:
                    self._handles.pop(place).remove()
                else:  # it came with the model, under rank 0's own key
                    getattr(module, change.kind).pop(change.key, None)
                continue
            with_kwargs, always = change.flags
            if change.kind == _PRE:
                handle = module.register_forward_pre_hook(change.hook, with_kwargs=with_kwargs)
            else:
                handle = module.register_forward_hook(
                    change.hook, with_kwargs=with_kwargs, always_call=always
                )
            self._handles[place] = handle
