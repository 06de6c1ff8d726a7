"""Runs one layer and notes what went through its modules and its attention. Knows no meaning of any of it.

Rows are ``[T, N]`` float32: a token each, whatever shape the layer's code gave them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.attention.base import Variant
from shoal.attention.hook import lent
from shoal.attention.sdpa import unpaged

__all__ = ["AttentionCall", "LayerCall", "LayerRun", "Noted", "rows_of", "run_layer"]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a model calls one of its layers with; the hidden states are replaced."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> torch.Tensor:
        """[1, T, W]."""
        found: torch.Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return found

    def with_hidden(self, hidden: torch.Tensor) -> LayerCall:
        """The same call with other hidden states."""
        if self.args:
            return LayerCall((hidden, *self.args[1:]), self.kwargs)
        return LayerCall((), {**self.kwargs, "hidden_states": hidden})

    @property
    def tables(self) -> str:
        """The argument that holds a pair of rotary tables [1, T, width]; empty: none does."""
        return next((name for name, value in self.kwargs.items() if _is_pair(value)), "")

    @property
    def is_sine_first(self) -> bool:
        """Whether the first table is the sines: those of position 0, where a call begins, are 0."""
        return bool(self.tables) and not bool(self.kwargs[self.tables][0][:, 0].any())

    def unrotated(self) -> LayerCall:
        """The same call with every token at position 0, where nothing is rotated."""
        kwargs = dict(self.kwargs)
        if self.tables:
            first, second = kwargs[self.tables]
            numbers = (0.0, 1.0) if self.is_sine_first else (1.0, 0.0)
            kwargs[self.tables] = torch.full_like(first, numbers[0]), torch.full_like(second, numbers[1])
        for name, value in self.kwargs.items():
            if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
                kwargs[name] = torch.zeros_like(value)
        return LayerCall(self.args, kwargs)


def _is_pair(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() == 3 for t in value)


@dataclass(frozen=True, slots=True)
class Noted:
    """One call of a module."""

    name: str
    module: nn.Module
    source: torch.Tensor  # as given
    out: torch.Tensor
    is_alone: bool = True  # it was given nothing else

    @property
    def is_leaf(self) -> bool:
        """Whether the module has no children."""
        return next(self.module.children(), None) is None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The one call of attention in a layer."""

    module: str
    query: torch.Tensor  # [T, Hq, E]
    key: torch.Tensor  # [T, H, E]
    value: torch.Tensor  # [T, H, Ev]
    out: torch.Tensor  # [T, Hq, Ev]
    variant: Variant
    sinks: torch.Tensor | None
    num_before: int  # modules that had returned by then


@dataclass(slots=True)
class LayerRun:
    """One run of a layer."""

    x: torch.Tensor  # [T, W]
    out: torch.Tensor  # [T, W]
    is_tuple: bool
    noted: list[Noted] = field(default_factory=list)  # in the order of their returns
    attention: list[AttentionCall] = field(default_factory=list)


class _Recorder:
    """In the place of an :class:`shoal.attention.hook.AttentionContext`: plain attention, noted."""

    def __init__(
        self, names: Mapping[nn.Module, str], noted: list[Noted], calls: list[AttentionCall]
    ) -> None:
        self._names, self._noted, self._calls = names, noted, calls

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        variant: Variant,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See :meth:`shoal.attention.hook.AttentionContext.attend`."""
        out = unpaged(query, key, value, variant, sinks)
        name, before = self._names[module], len(self._noted)
        self._calls.append(AttentionCall(name, query, key, value, out, variant, sinks, before))
        return out


@torch.inference_mode()
def run_layer(layer: nn.Module, call: LayerCall) -> LayerRun:
    """Run a layer on its own.

    Raises:
        Exception: whatever the layer's own code raises.
    """
    noted: list[Noted] = []
    attention: list[AttentionCall] = []
    names = {module: name for name, module in layer.named_modules()}
    with lent(layer, _Recorder(names, noted, attention)), _watching(layer, noted):
        result = layer(*call.args, **call.kwargs)
    is_tuple = isinstance(result, tuple)
    hidden = result[0] if is_tuple else result
    tokens = call.hidden.shape[1]
    return LayerRun(rows_of(call.hidden, tokens), rows_of(hidden, tokens), is_tuple, noted, attention)


@contextmanager
def _watching(layer: nn.Module, noted: list[Noted]) -> Iterator[None]:
    handles = []
    for name, module in layer.named_modules():
        if module is not layer:
            handles.append(module.register_forward_hook(_note(name, noted), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(name: str, noted: list[Noted]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        made = out[0] if isinstance(out, tuple) and out else out
        if given and isinstance(given[0], torch.Tensor) and isinstance(made, torch.Tensor):
            # Some code adds to what it was given in place; what was seen is kept as it was.
            noted.append(Noted(name, module, given[0].clone(), made.clone(), len(given) == 1 and bool(args)))

    return hook


def rows_of(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """A row a token, float32: [1, T, ...], [T, ...] or [1, heads, T, width] as [T, N].

    Raises:
        ValueError: no dimension is the tokens'.
    """
    tensor = tensor.float()
    while tensor.dim() > 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.shape[0] == tokens:
        return tensor.reshape(tokens, -1)
    if tensor.dim() == 3 and tensor.shape[1] == tokens:
        return tensor.transpose(0, 1).reshape(tokens, -1)
    raise ValueError(f"no row a token: {list(tensor.shape)} for {tokens} tokens")
