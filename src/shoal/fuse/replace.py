"""Finds a model's layers, and puts fused ones in their place where they prove equal. Knows no layer's parts.

A layer's module stays, with its norms and small parameters; its ``forward`` becomes ours and its big weights
go. Layers whose input is the output of the one before run as one stack: the first ones only note what they
are called with and hand their input on, the last one runs them all.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shoal.attention.base import LayerPages
from shoal.attention.cpu import CpuPaged
from shoal.attention.hook import AttentionContext
from shoal.comm.base import Comm
from shoal.cpu_kernels.settle import settle
from shoal.errors import EngineError
from shoal.fuse.buffers import Buffers
from shoal.fuse.build import LayerDraft, draft_layer
from shoal.fuse.common import agree, attempt
from shoal.fuse.prove import difference, proof_inputs
from shoal.fuse.recipe import LayerRecipe
from shoal.fuse.recognise import recognise, suppose
from shoal.fuse.record import LayerCall
from shoal.fuse.stack import Stack
from shoal.fuse.tables import Tables
from shoal.fuse.weights import Packer

__all__ = ["Chain", "FusedLayers", "fuse_layers"]

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
    _chains: list[Chain] = field(default_factory=list)

    @property
    def num_fused(self) -> int:
        return sum(len(chain.ready) for chain in self._chains)

    @property
    def foreign(self) -> list[str]:
        """Parts of fused layers, by their paths in a layer, that compute with their own code."""
        recipes = (ready.recipe for chain in self._chains for ready in chain.ready)
        return list(dict.fromkeys(path for recipe in recipes for path in recipe.foreign))

    @property
    def num_stacks(self) -> int:
        return len(self._chains)

    @property
    def only_chain(self) -> Chain | None:
        """The layers, if all of the model's are fused and run as one."""
        return self._chains[0] if len(self._chains) == 1 and self.num_fused == self.num_layers else None

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


class Chain:
    """Layers in a row that run as one stack.

    ``given`` is what each layer was last called with as its tables, [1, T, width], or None.
    """

    def __init__(self, ready: Sequence[_Ready], stack: Stack, context: AttentionContext) -> None:
        self.ready = tuple(ready)
        self.stack = stack
        self._context = context
        self.given: list[Tables | None] = [None] * len(ready)

    @property
    def modules(self) -> list[nn.Module]:
        """The layers' own."""
        return [ready.layer.module for ready in self.ready]

    def replace(self) -> None:
        """Have the layers' modules call this."""
        for index, ready in enumerate(self.ready):
            ready.layer.module.forward = self._forward(index, ready.recipe)

    def _forward(self, index: int, recipe: LayerRecipe) -> Any:
        is_last = index == len(self.ready) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
            self.given[index] = kwargs.get(recipe.tables) if recipe.tables else None
            if is_last:
                hidden = self._run(hidden[0])[None].to(hidden.dtype)
            return (hidden,) if recipe.is_tuple else hidden

        return forward

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        """All layers, on [T, W]."""
        if self._context.batch is None:
            raise EngineError("fused layers run over pages only")
        pairs: dict[int, Tables] = {}  # layers mostly share one
        for given in self.given:
            if given is not None and id(given) not in pairs:
                pairs[id(given)] = given[0][0], given[1][0]
        tables = [None if given is None else pairs[id(given)] for given in self.given]
        return self.stack.run(hidden, self._context.batch, tables)


@torch.inference_mode()
def fuse_layers(
    model: PreTrainedModel,
    context: AttentionContext,
    kernel: CpuPaged,
    comm: Comm,
    storage: str,
    run: Callable[[torch.Tensor], object] | None = None,
) -> FusedLayers:
    """Replace what can be; all ranks call together.

    Args:
        model: with its weights, attached to ``context``, which has seen a run of it.
        kernel: whose team computes.
        storage: of packed weights, a name of :data:`shoal.cpu_kernels.layout.STORAGES`.
        run: runs the model on ids [1, T]; None: as a decoder is run.
    """
    layers = _find(model, context, comm, run or _run_decoder(model))
    fused = FusedLayers(len(context.modules))
    buffers = Buffers()
    rows: list[list[_Ready]] = [[]]
    preparer = _Preparer(context, kernel, comm, storage)
    for layer in layers:
        ready, problem = preparer.prepare(layer)
        if ready is None:
            fused.problems.append(f"{layer.path}: {problem}")
            rows.append([])
            continue
        ready.packer.free()
        fused.num_bytes += ready.packer.num_bytes
        if not layer.follows and rows[-1]:
            rows.append([])
        rows[-1].append(ready)
    settle(weight for row in rows for ready in row for weight in ready.packer.weights)
    for row in filter(None, rows):
        stack = Stack([(ready.draft, ready.recipe.output) for ready in row], kernel, comm, buffers)
        chain = Chain(row, stack, context)
        chain.replace()
        fused._chains.append(chain)
    return fused


def _run_decoder(model: PreTrainedModel) -> Callable[[torch.Tensor], object]:
    return lambda ids: model(input_ids=ids, use_cache=False, return_dict=True)


def _find(
    model: PreTrainedModel, context: AttentionContext, comm: Comm, run: Callable[[torch.Tensor], object]
) -> list[_Layer]:
    """The model's layers, as it called them in a run of its own."""
    paths = {module: path for path, module in model.named_modules()}
    layers: dict[str, int] = {}
    for module in context.modules:
        found = _LAYER.match(paths[module])
        if found is not None and found[1] not in layers and len(context.layers_of(module)) == 1:
            (layers[found[1]],) = context.layers_of(module)
    calls: dict[str, list[LayerCall]] = {path: [] for path in layers}
    outputs: dict[str, torch.Tensor] = {}
    handles = []
    for path in layers:
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(_note_call(calls[path]), with_kwargs=True))
        handles.append(module.register_forward_hook(_note_output(outputs, path)))
    tokens = _choose_tokens(model, comm)
    ids = torch.arange(tokens)[None] % model.config.get_text_config().vocab_size
    before, context.batch = context.batch, None
    try:
        run(ids)
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


def _choose_tokens(model: PreTrainedModel, comm: Comm) -> int:
    """The same on every rank, whatever the sizes of its parts."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    config = model.config.get_text_config()
    sizes |= {value for value in vars(config).values() if isinstance(value, int)}
    taken = comm.all_reduce(torch.tensor([int(tokens in sizes) for tokens in _TOKENS]))
    return _TOKENS[int(taken.argmin())]


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


class _Preparer:
    """Recognises, proves and packs layers, one after the other. All ranks say the same of each."""

    def __init__(self, context: AttentionContext, kernel: CpuPaged, comm: Comm, storage: str) -> None:
        self._context, self._kernel, self._comm, self._storage = context, kernel, comm, storage
        self._last: LayerRecipe | None = None  # most layers are of a kind

    def prepare(self, layer: _Layer) -> tuple[_Ready | None, str]:
        """What stands for a layer, or why nothing does."""
        generator = torch.Generator().manual_seed(layer.number)
        call = _as_float(layer.call)
        call = call.with_hidden(torch.randn(call.hidden.shape, generator=generator))
        exact, problem = attempt(lambda: _exact(layer))
        if not agree(self._comm, "" if exact is None else "here") or exact is None:
            return None, problem
        last, ready = self._last, None
        if last is not None:
            ready, _ = self._proved(layer, exact, call, lambda: suppose(last, exact, call))
        if ready is None:
            ready, problem = self._proved(layer, exact, call, lambda: recognise(exact, call))
        if ready is not None:
            self._last = ready.recipe
        return ready, problem

    def _proved(
        self, layer: _Layer, exact: nn.Module, call: LayerCall, find: Callable[[], LayerRecipe]
    ) -> tuple[_Ready | None, str]:
        """What stands for a layer by the recipe that is found, if it is right."""

        def trial() -> _Ready:
            recipe = find()
            return self._packed(layer, exact, recipe, "float32")

        tried, problem = attempt(trial)
        if not agree(self._comm, "" if tried is None else tried.recipe.outline) or tried is None:
            return None, problem or "another rank computes something else"
        gap, problem = attempt(lambda: self._gap(layer, exact, call, tried))
        if gap is not None and gap > _TOLERANCE:
            problem = f"as recognised it differs by {gap:.1e}"
        if not agree(self._comm, "" if problem else "equal"):
            return None, problem or "on another rank it differs"
        if exact is layer.module and self._storage == "float32":
            return tried, ""
        return self._packed(layer, layer.module, tried.recipe, self._storage), ""

    def _packed(self, layer: _Layer, module: nn.Module, recipe: LayerRecipe, storage: str) -> _Ready:
        is_first, width = self._comm.rank == 0, layer.call.hidden.shape[2]
        packer = Packer(module, storage, is_first)
        return _Ready(
            layer, recipe, draft_layer(recipe, module, layer.number, packer, width, is_first), packer
        )

    def _gap(self, layer: _Layer, exact: nn.Module, call: LayerCall, tried: _Ready) -> float:
        stack = Stack([(tried.draft, tried.recipe.output)], self._kernel, self._comm, Buffers())
        generator = torch.Generator().manual_seed(layer.number)
        inputs = proof_inputs(exact, call.hidden.shape, generator, self._comm)
        shape, is_causal = self._context.shapes[layer.number], tried.draft.attend.variant.is_causal
        return difference(stack, layer.number, exact, call, shape, inputs, is_causal)


def _exact(layer: _Layer) -> nn.Module:
    """The layer, or a copy of it, in float32."""
    if layer.call.hidden.dtype is torch.float32:
        return layer.module
    return copy.deepcopy(layer.module).float()


def _as_float(call: LayerCall) -> LayerCall:
    """Floating-point arguments in float32."""
    return LayerCall(
        tuple(map(_float, call.args)), {name: _float(value) for name, value in call.kwargs.items()}
    )


def _float(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return tuple(map(_float, value)) if type(value) is tuple else value
