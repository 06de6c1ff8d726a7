"""Has a model's layers compute on rows of tokens while the model itself goes on with padded grids: what goes
into its first layer is packed, what comes out of its last one is spread again. Knows no attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Rows", "layers_of"]

_LAYER = re.compile(r"^(.*?\.?\d+)(?:\.|$)")


def layers_of(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The members of lists of modules that ``modules`` are parts of, each once, in order.

    Raises:
        LookupError: one is no part of any.
    """
    paths = {module: path for path, module in model.named_modules()}
    found: dict[str, None] = {}
    for module in modules:
        layer = _LAYER.match(paths[module])
        if layer is None:
            raise LookupError(f"{paths[module] or 'the model'} is no part of a list of layers")
        found[layer[1]] = None
    return [model.get_submodule(path) for path in found]


class Rows:
    """Hooks of a model's layers, once installed; they do nothing outside :meth:`over`.

    Args:
        model: whose layers.
        modules: what attention is called from.

    Raises:
        LookupError: there are no layers.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        layers = layers_of(model, modules)
        if not layers:
            raise LookupError("its attention does not pass through the interface")
        self._last = -1  # number of the last call of a layer in a run
        self._call = -1
        self._is_counting = False
        self._cells: torch.Tensor | None = None
        self._shape = torch.Size()
        self._layers = layers
        self._handles: list[Any] = []

    def install(self) -> None:
        """Put the hooks there."""
        for layer in self._layers:
            self._handles.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._after))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """See how often a run inside calls layers: one may be called more than once."""
        self._is_counting, self._last = True, -1
        self.install()
        try:
            yield
        finally:
            self._is_counting = False
            self.remove()

    @contextmanager
    def over(self, cells: torch.Tensor, shape: torch.Size) -> Iterator[None]:
        """For one run of the model: ``cells`` [T] of grids of ``shape`` (B, L) hold tokens."""
        self._cells, self._shape, self._call = cells, shape, -1
        try:
            yield
        finally:
            self._cells = None

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._last += self._is_counting
        if self._cells is None:
            return None
        self._call += 1
        packed = tuple(self._packed(value) for value in args)
        return packed, {name: self._packed(value) for name, value in kwargs.items()}

    def _packed(self, value: Any) -> Any:
        """Tensors [B, L, ...] or [1, L, ...] as [1, T, ...]."""
        if isinstance(value, tuple):
            return tuple(map(self._packed, value))
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != self._shape[1]:
            return value
        assert self._cells is not None
        if value.shape[0] == self._shape[0]:
            return value.flatten(0, 1)[self._cells][None]
        return value[:, self._cells % self._shape[1]] if value.shape[0] == 1 else value

    def _after(self, module: nn.Module, args: Any, out: Any) -> Any:
        if self._cells is None or self._call != self._last:
            return None
        hidden = out[0] if isinstance(out, tuple) else out
        grid = hidden.new_zeros(self._shape.numel(), hidden.shape[-1])
        grid[self._cells] = hidden[0]
        spread = grid.view(*self._shape, -1)
        return (spread, *out[1:]) if isinstance(out, tuple) else spread
