"""Redirects a transformers model's attention to ours, and measures what it keeps. Knows no scheduler.

transformers looks its attention function up by name; ours is registered once, under ``shoal_paged``,
and finds the state of the model it was called from on the calling module (:class:`AttentionContext`,
attached to every module of the model by :func:`attach`). So two models in one process never meet.
Because no mask function is registered under that name, transformers builds no mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shoal.attention import pages as paging
from shoal.attention.base import AttentionBatch, KVShape, LayerPages, PagedKernel, Variant, WritesPages
from shoal.attention.sdpa import unpaged

__all__ = ["NAME", "Attends", "AttentionContext", "attach", "lent", "use_attention"]

NAME = "shoal_paged"
_ATTRIBUTE = "_shoal_attention"
_CAUSAL = "_shoal_is_causal"


class Attends(Protocol):
    """What a module's attention is sent to."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        variant: Variant,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [T, Hq, Ek], key [T, H, Ek], value [T, H, Ev] to [T, Hq, Ev]."""
        ...


class AttentionContext:
    """One model's attention state.

    With no batch set it *measures*: the tokens are one sequence, attended to without pages, and
    each layer's KV shape is noted in call order. With a batch it serves. A module that the first pass calls
    several times (layers run in a loop) is as many layers.
    """

    def __init__(self, kernel: PagedKernel) -> None:
        self.kernel = kernel
        self._write = kernel.write if isinstance(kernel, WritesPages) else paging.write
        self.shapes: list[KVShape] = []
        self.pages: list[LayerPages] = []
        self.batch = None
        self._layers_of: dict[nn.Module, list[int]] = {}

    @property
    def batch(self) -> AttentionBatch | None:
        """What is attended to; setting it, whatever it was, begins a pass of the model."""
        return self._batch

    @batch.setter
    def batch(self, batch: AttentionBatch | None) -> None:
        self._batch = batch
        self._calls: Counter[nn.Module] = Counter()  # in this pass
        self._is_measured = bool(self.shapes)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        variant: Variant,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See :class:`Attends`."""
        if self.batch is None:
            window = variant.window if variant.is_causal else None
            self._note(module, KVShape(key.shape[1], key.shape[2], value.shape[2], window))
            return unpaged(query, key, value, variant, sinks)
        layers = self._layers_of[module]
        number = layers[0] if len(layers) == 1 else layers[self._next_call(module)]
        layer, batch = self.pages[number], self.batch.of(self.shapes[number].window)
        self._write(layer, key, value, batch.slots)
        return self.kernel(query, layer, batch, variant, sinks)

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionContext:
        """A copy of a module attends to the same: some models share module instances, activations say, with
        every other of their class, and what hangs on those would be copied with any of these.
        """
        return self

    @property
    def modules(self) -> list[nn.Module]:
        """Modules that attention was called from, in the order of their first calls."""
        return list(self._layers_of)

    def layers_of(self, module: nn.Module) -> Sequence[int]:
        """Numbers of the layers that a module's attention is, one a call of a pass, in the order of calls."""
        return self._layers_of[module]

    def _note(self, module: nn.Module, shape: KVShape) -> None:
        layers = self._layers_of.setdefault(module, [])
        call = self._next_call(module)
        if not layers or (not self._is_measured and call == len(layers)):
            layers.append(len(self.shapes))
            self.shapes.append(shape)

    def _next_call(self, module: nn.Module) -> int:
        """Which of this pass's calls of a module this is."""
        self._calls[module] += 1
        return self._calls[module] - 1


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,  # dropout and whatever else a model passes along; the self-check at load catches what mattered
) -> tuple[torch.Tensor, None]:
    context: Attends = getattr(module, _ATTRIBUTE)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    variant = Variant(scale, sliding_window, softcap, getattr(module, _CAUSAL))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # of [1, heads, T, width]
    return context.attend(module, q, k, v, variant, s_aux)[None], None


def attach(model: PreTrainedModel, context: AttentionContext, is_causal: bool = True) -> None:
    """Send ``model``'s attention to ``context`` from now on, as a decoder's or as an encoder's."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _paged_attention)
    for module in model.modules():
        object.__setattr__(module, _ATTRIBUTE, context)
        object.__setattr__(module, _CAUSAL, is_causal)
    use_attention(model, NAME)


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Have every part of ``model`` call attention by a name of transformers' registry; some parts have copies
    of its config.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = name


@contextmanager
def lent(part: nn.Module, context: Attends) -> Iterator[None]:
    """Send the attention of a part of an attached model elsewhere for a while."""
    before = {module: getattr(module, _ATTRIBUTE) for module in part.modules()}
    try:
        for module in before:
            object.__setattr__(module, _ATTRIBUTE, context)
        yield
    finally:
        for module, own in before.items():
            object.__setattr__(module, _ATTRIBUTE, own)
