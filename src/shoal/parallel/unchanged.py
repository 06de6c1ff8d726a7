"""Whether a parallel model's modules are still what the ranks were given. Knows no process.

Settings, hooks and random states follow rank 0's (:mod:`.surroundings`). What a program sets on a module
itself between calls would be rank 0's alone: summed with the other ranks' it gives neither the old model's
numbers nor the new one's.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

from torch import nn

from shoal.errors import UsageError

__all__ = ["Unchanged"]

_PLAIN = (bool, int, float, str)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_TABLES = ("_modules", "_parameters")
_State = tuple[Any, ...]


class Unchanged:
    """The plain attributes (numbers, words, functions), submodules and parameters of every module.

    Buffers, and attributes that a module did not have, are not looked at; nor is what is written into a
    tensor.

    Args:
        model: is not kept alive, nor is anything in it.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = model.named_modules()
        self._modules = [(name, weakref.ref(module), _watched(module)) for name, module in modules]
        self._last: list[_State | None] = []
        self.note()

    def note(self) -> None:
        """All ranks have what there is now: a forward may count or grow on every rank alike."""
        self._last = [_state(ref(), keys) for _, ref, keys in self._modules]

    def check(self) -> None:
        """Refuse what was changed since the last note.

        Raises:
            UsageError: the message names the module and the attribute.
        """
        for (name, ref, keys), last in zip(self._modules, self._last, strict=True):
            now = _state(ref(), keys)
            if now == last or now is None or last is None:
                continue
            names = [*keys, "its submodules", "its parameters"]
            what = next(key for key, old, new in zip(names, last, now, strict=True) if old != new)
            raise UsageError(
                f"{name or 'the model'}: {what} changed since shoal.parallelize, on this rank alone: "
                "undo it, or change the model before it is parallelized"
            )


def _watched(module: nn.Module) -> tuple[str, ...]:
    """Names of attributes; ``forward`` may be put over the class's at any time."""
    plain = (
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and key not in ("training", "forward")
        if type(value) in _PLAIN or isinstance(value, _FUNCTIONS)
    )
    return (*plain, "forward")


def _state(module: nn.Module | None, keys: tuple[str, ...]) -> _State | None:
    """Values of plain attributes, and by identity all else; None of a module that is gone."""
    if module is None:
        return None
    own = vars(module)
    values = (value if type(value) in _PLAIN else id(value) for value in map(own.get, keys))
    return (*values, *(tuple(map(id, own[table].values())) for table in _TABLES))
