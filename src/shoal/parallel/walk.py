"""Finds the tensors in a call's arguments and results, however they are packed. Knows no model and no rank.

Two ranks that walk equal structures meet the tensors in the same order: that is how a tensor gets a name
that both understand.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

__all__ = ["Visit", "walk", "walk_call"]

Visit = Callable[[torch.Tensor, bool], torch.Tensor]
"""Given a tensor, and whether it lies in an object that is neither a plain container nor a model's output
(a cache, say): the tensor to have in its place."""

_ATOMS = (
    str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, torch.Size, enum.Enum,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, nn.Module,
    PreTrainedConfig, torch.Generator, torch.Stream,
)  # fmt: skip


def walk(value: Any, visit: Visit, is_state: bool = False, seen: dict[int, Any] | None = None) -> Any:
    """Visit every tensor in ``value``.

    Lists, dicts and objects are changed in place, tuples rebuilt where one of theirs was replaced. An
    object that occurs twice is walked once.

    Args:
        is_state: whether ``value`` itself lies in a stateful object.
        seen: objects walked already, by id.

    Returns:
        ``value``, or what stands in its place.
    """
    if isinstance(value, torch.Tensor):
        return visit(value, is_state)
    if isinstance(value, _ATOMS):
        return value
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)][1]
    seen[id(value)] = (value, value)  # the first keeps it alive, so that its id stays its own
    if isinstance(value, tuple):
        new = _walk_tuple(value, visit, is_state, seen)
        seen[id(value)] = (value, new)
        return new
    if isinstance(value, list):
        for index, item in enumerate(value):
            new = walk(item, visit, is_state, seen)
            if new is not item:
                value[index] = new
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            new = walk(item, visit, is_state, seen)
            if new is not item:
                value[key] = new
    elif not isinstance(value, (set, frozenset)):
        _walk_object(value, visit, seen)
    return value


def _walk_tuple(value: tuple[Any, ...], visit: Visit, is_state: bool, seen: dict[int, Any]) -> Any:
    items = [walk(item, visit, is_state, seen) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _walk_object(value: Any, visit: Visit, seen: dict[int, Any]) -> None:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        walk(attributes, visit, True, seen)
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            item = getattr(value, name, None)
            if item is None or name in ("__dict__", "__weakref__"):
                continue
            new = walk(item, visit, True, seen)
            if new is not item:
                object.__setattr__(value, name, new)


def walk_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    visit: Visit,
    state_names: frozenset[str] = frozenset(),
) -> Any:
    """Visit the tensors of a call after it: in its arguments, then in its output.

    Args:
        state_names: names of output fields that are state: those the module takes back as arguments.

    Returns:
        the output, or what stands in its place.
    """
    seen: dict[int, Any] = {}
    walk(args, visit, False, seen)
    walk(kwargs, visit, False, seen)
    if not isinstance(output, Mapping) or not isinstance(output, dict):
        return walk(output, visit, False, seen)
    seen[id(output)] = (output, output)
    for name, item in list(output.items()):
        new = walk(item, visit, name in state_names, seen)
        if new is not item:
            output[name] = new
    return output
