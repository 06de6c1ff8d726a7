"""Finds a model's layers, and puts fused ones in their place where they prove equal. Knows no layer's parts.

A layer's module stays, with its norms and small parameters; its ``forward`` becomes ours and its big weights go.
Layers whose input is the output of the one before run as one stack: the first ones only note what they are called
with and hand their input on, the last one runs them all.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shoal.attention.base import LayerPages
from shoal.attention.cpu import CpuPaged
from shoal.attention.hook import AttentionContext
from shoal.comm.base import Comm
from shoal.errors import EngineError
from shoal.fuse.build import LayerDraft, draft_layer
from shoal.fuse.common import UnrecognisedError
from shoal.fuse.prove import difference
from shoal.fuse.recipe import LayerRecipe
from shoal.fuse.recognise import recognise
from shoal.fuse.record import LayerCall
from shoal.fuse.stack import Buffers, Stack, Tables
from shoal.fuse.weights import Packer

__all__ = ["FusedLayers", "fuse_layers"]

_log = logging.getLogger("shoal.fuse")

_TOKENS = (19, 23, 29, 17, 13)  # of the runs; the first that is no dimension of a layer
_TOLERANCE = 2e-4
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


@dataclass(slots=True)
class _Layer:
    """A layer that was found."""

    path: str
    module: nn.Module
    number: int  # of its pages
    call: LayerCall
    follows: bool  # its input is the output of the layer before


@dataclass(slots=True)
class _Ready:
    """A layer that proved equal."""

    layer: _Layer
    recipe: LayerRecipe
    draft: LayerDraft
    packer: Packer


@dataclass(slots=True)
class FusedLayers:
    """What was replaced."""

    num_layers: int  # of the model
    num_bytes: int = 0  # of packed weights
    problems: list[str] = field(default_factory=list)  # why layers were not fused
    _chains: list[_Chain] = field(default_factory=list)

    @property
    def num_fused(self) -> int:
        return sum(len(chain.ready) for chain in self._chains)

    @property
    def num_stacks(self) -> int:
        return len(self._chains)

    def use_pages(self, pages: Sequence[LayerPages]) -> None:
        """Keys and values of all layers of the model."""
        by_number = dict(enumerate(pages))
        for chain in self._chains:
            chain.stack.use_pages(by_number)

    def restore(self) -> None:
        """Put the layers back as they were."""
        for chain in self._chains:
            for ready in chain.ready:
                vars(ready.layer.module).pop("forward", None)
                ready.packer.restore()
        self._chains.clear()


class _Chain:
    """Layers in a row that run as one stack."""

    def __init__(self, ready: Sequence[_Ready], stack: Stack, context: AttentionContext) -> None:
        self.ready = tuple(ready)
        self.stack = stack
        self._context = context
        self._tables: list[Tables | None] = [None] * len(ready)

    def replace(self) -> None:
        """Have the layers' modules call this."""
        for index, ready in enumerate(self.ready):
            ready.layer.module.forward = self._forward(index, ready.recipe)  # type: ignore[method-assign]

    def _forward(self, index: int, recipe: LayerRecipe) -> Any:
        is_last = index == len(self.ready) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = LayerCall(args, kwargs)
            hidden = call.hidden
            tables = kwargs.get(recipe.tables) if recipe.tables else None
            self._tables[index] = None if tables is None else (tables[0][0], tables[1][0])
            if is_last:
                if self._context.batch is None:
                    raise EngineError("fused layers run over pages only")
                hidden = self.stack.run(hidden[0], self._context.batch, self._tables)[None].to(hidden.dtype)
            return (hidden,) if recipe.is_tuple else hidden

        return forward


@torch.inference_mode()
def fuse_layers(
    model: PreTrainedModel, context: AttentionContext, kernel: CpuPaged, comm: Comm, storage: str
) -> FusedLayers:
    """Replace what can be; all ranks call together.

    Args:
        model: with its weights, attached to ``context``, which has seen a run of it.
        kernel: whose team computes.
        storage: of packed weights, a name of :data:`shoal.cpu_kernels.layout.STORAGES`.
    """
    layers = _find(model, context)
    fused = FusedLayers(len(context.modules))
    buffers = Buffers()
    rows: list[list[_Ready]] = [[]]
    for layer in layers:
        ready, problem = _prepare(layer, context, kernel, comm, storage)
        if not _agreed(comm, ready is not None) or ready is None:
            fused.problems.append(f"{layer.path}: {problem or 'another rank could not'}")
            rows.append([])
            continue
        ready.packer.free()
        fused.num_bytes += ready.packer.num_bytes
        if not layer.follows and rows[-1]:
            rows.append([])
        rows[-1].append(ready)
    for row in filter(None, rows):
        stack = Stack([(ready.draft, ready.recipe.output) for ready in row], kernel, comm, buffers)
        chain = _Chain(row, stack, context)
        chain.replace()
        fused._chains.append(chain)
    return fused


def _agreed(comm: Comm, is_fine: bool) -> bool:
    """Whether all ranks are fine."""
    return int(comm.all_reduce(torch.tensor([int(is_fine)], dtype=torch.int64))) == comm.size


def _find(model: PreTrainedModel, context: AttentionContext) -> list[_Layer]:
    """The model's layers, as it called them in a run of its own."""
    paths = {module: path for path, module in model.named_modules()}
    layers: dict[str, int] = {}
    for module in context.modules:
        found = _LAYER.match(paths[module])
        if found is not None and found[1] not in layers:
            layers[found[1]] = context.layer_of(module)
    calls: dict[str, list[LayerCall]] = {path: [] for path in layers}
    outputs: dict[str, torch.Tensor] = {}
    handles = []
    for path in layers:
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(_note_call(calls[path]), with_kwargs=True))
        handles.append(module.register_forward_hook(_note_output(outputs, path)))
    tokens = _choose_tokens(model)
    ids = torch.arange(tokens)[None] % model.config.get_text_config().vocab_size
    before, context.batch = context.batch, None
    try:
        model(input_ids=ids, use_cache=False, return_dict=True)
    finally:
        context.batch = before
        for handle in handles:
            handle.remove()
    result: list[_Layer] = []
    previous: torch.Tensor | None = None
    for path, number in layers.items():
        if len(calls[path]) == 1 and (calls[path][0].args or "hidden_states" in calls[path][0].kwargs):
            call = calls[path][0]
            follows = previous is not None and torch.equal(previous, call.hidden)
            result.append(_Layer(path, model.get_submodule(path), number, call, follows))
        previous = outputs.get(path)
    return result


def _choose_tokens(model: PreTrainedModel) -> int:
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    config = model.config.get_text_config()
    sizes |= {value for value in vars(config).values() if isinstance(value, int)}
    return next((tokens for tokens in _TOKENS if tokens not in sizes), _TOKENS[0])


def _note_call(found: list[LayerCall]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found.append(LayerCall(args, dict(kwargs)))

    return hook


def _note_output(found: dict[str, torch.Tensor], path: str) -> Any:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if isinstance(hidden, torch.Tensor):
            found[path] = hidden

    return hook


def _prepare(
    layer: _Layer, context: AttentionContext, kernel: CpuPaged, comm: Comm, storage: str
) -> tuple[_Ready | None, str]:
    """The layer recognised, packed and proved; or why not."""
    generator = torch.Generator().manual_seed(layer.number)
    exact = layer.module if layer.call.hidden.dtype is torch.float32 else copy.deepcopy(layer.module).float()
    call = _as_float(layer.call)
    try:
        recipe = recognise(exact, call.with_hidden(torch.randn(call.hidden.shape, generator=generator)))
        width, is_first = call.hidden.shape[2], comm.rank == 0
        trial = draft_layer(recipe, exact, layer.number, Packer(exact, "float32", is_first), width, is_first)
        stack = Stack([(trial, recipe.output)], kernel, comm, Buffers())
        error = difference(stack, layer.number, exact, call, context.shapes[layer.number], generator)
        if error > _TOLERANCE:
            return None, f"as recognised it differs by {error:.1e}"
        packer = Packer(layer.module, storage, is_first)
        return _Ready(
            layer, recipe, draft_layer(recipe, layer.module, layer.number, packer, width, is_first), packer
        ), ""
    except UnrecognisedError as error:
        return None, str(error)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        # Whatever a layer's own code makes of being run alone: it is left as it is.
        return None, f"{type(error).__name__}: {str(error)[:200]}"


def _as_float(call: LayerCall) -> LayerCall:
    """Floating-point arguments in float32."""
    return LayerCall(
        tuple(map(_float, call.args)), {name: _float(value) for name, value in call.kwargs.items()}
    )


def _float(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return tuple(map(_float, value)) if type(value) is tuple else value
