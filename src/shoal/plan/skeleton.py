"""Builds models without their weights: whole ones on meta, and short ones of which only what lies
between the linears has values. Knows no plan.

Nothing global is touched: creation is redirected by torch function modes, which belong to the thread,
and random numbers come from a generator of our own.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.errors import PlanError
from shoal.plan.linears import is_linear
from shoal.plan.random import OwnRandom, fills_randomly, own_random

__all__ = [
    "BigOnMeta",
    "Cut",
    "build_on_meta",
    "build_probe",
    "build_with_generator",
    "building",
    "cut_depth",
]

_BUILDING = threading.RLock()

_BIG = 1 << 16  # elements from which uninitialised memory goes to meta
_BIG_CONSTANT = 1 << 24  # the same for zeros and ones, which may be masks that are read
_RAW_IS_WEIGHT = 1 << 12  # elements from which a raw matrix parameter counts as a weight


class BigOnMeta(TorchFunctionMode):
    """Big fresh tensors are created on meta; random filling, slow and soon overwritten, is skipped."""

    _EMPTY = (torch.empty, torch.randn, torch.rand)
    _CONSTANT = (torch.zeros, torch.ones, torch.full)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if fills_randomly(func, kwargs):
            return args[0] if args else kwargs["tensor"]
        limit = _BIG if func in self._EMPTY else _BIG_CONSTANT if func in self._CONSTANT else None
        if limit is not None and kwargs.get("dtype") is not torch.bool and _numel(args, kwargs) >= limit:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _numel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    shape = kwargs.get("size", args)
    if len(shape) >= 1 and isinstance(shape[0], (tuple, list)):
        shape = shape[0]
    return math.prod(int(size) for size in shape if isinstance(size, int))


def private_config(config: Any, attention: str = "eager") -> Any:
    """A copy of the config that computes in the plainest way, unless another attention is asked for."""
    own = copy.deepcopy(config)
    own._attn_implementation = attention
    if hasattr(own, "_experts_implementation"):
        own._experts_implementation = "eager"
    return own


@contextmanager
def building() -> Iterator[None]:
    """One model at a time in this process: transformers' constructors set the default dtype and replace
    ``torch.nn.init`` functions for a while, globally, and two threads that do so leave them replaced.
    """
    with _BUILDING:
        yield


def build_on_meta(model_class: type[nn.Module], config: Any) -> nn.Module:
    """The whole model, every tensor on meta: names, shapes and ties, no storage."""
    with building(), torch.device("meta"):
        return model_class(private_config(config)).eval()


def build_with_generator(
    model_class: type[nn.Module], config: Any, generator: torch.Generator, attention: str = "eager"
) -> nn.Module:
    """The model with real, random weights; the thread's own random state is left alone."""
    with building(), OwnRandom(generator):
        return model_class(private_config(config, attention)).eval()


def build_probe(model_class: type[nn.Module], config: Any) -> nn.Module:
    """The model with its weights on meta and real, random values for what lies between them.

    Norms, biases and small raw parameters are random (zeros and ones would hide a wrong slice) and ask
    for gradients; rotary tables and masks hold what the model computed.
    """
    generator = torch.Generator().manual_seed(1)
    with building(), own_random(), BigOnMeta():
        model = model_class(private_config(config)).eval()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = _probe_parameter(module, parameter, generator)
    return model


def _probe_parameter(module: nn.Module, parameter: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    is_weight = parameter.dim() >= 2 and (
        is_linear(module) or isinstance(module, nn.Embedding) or parameter.numel() > _RAW_IS_WEIGHT
    )
    if parameter.is_meta or is_weight:
        if parameter.is_meta:
            return parameter  # left as it is, so that ties stay
        return nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)
    # A gain keeps its mean of one, so that the signal neither dies nor explodes.
    mean = 1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0
    values = torch.empty(parameter.shape).normal_(mean, 0.2, generator=generator)
    return nn.Parameter(values, requires_grad=True)


# ------------------------------------------------------------------ the fewest layers that show every kind


@dataclass(frozen=True, slots=True)
class Cut:
    """A config whose model has only the first layers, and what they stand for.

    Per stack of layers (name of its module list): ``depths`` has the number of layers of the short
    model, ``kinds`` for each layer of the full model the index of the short model's layer of its kind.
    """

    config: Any
    kinds: dict[str, tuple[int, ...]]
    depths: dict[str, int]


def cut_depth(model_class: type[nn.Module], config: Any, full: nn.Module) -> Cut:
    """Shorten every stack of layers to the fewest first layers that show every kind (at least two).

    Which config attribute counts the layers is found by trying those that hold the stack's length. Where
    none works the stack keeps its depth: slower, not wrong.
    """
    own = copy.deepcopy(config)
    kinds: dict[str, tuple[int, ...]] = {}
    depths: dict[str, int] = {}
    for name, stack in _stacks(full):
        numbered = _numbered(stack)
        signatures = [_signature(layer, numbered) for layer in stack]
        first = [signatures.index(signature) for signature in signatures]
        depth = max(2, max(first) + 1)
        shorter = _shorten(model_class, own, full, name, depth) if depth < len(stack) else None
        own = shorter or own
        kinds[name] = tuple(first)
        depths[name] = depth if shorter is not None else len(stack)
    return Cut(own, kinds, depths)


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """The module lists that are in no other module list."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inside:
            found.append(name)
            yield name, module


def _settings(layer: nn.Module) -> Iterator[tuple[str, str, int | bool | str]]:
    """(module within the layer, attribute, value) of the small settings of a layer's modules."""
    for name, module in layer.named_modules():
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and type(value) in (int, bool, str):
                yield name, key, value


def _numbered(stack: nn.ModuleList) -> set[tuple[str, str]]:
    """The settings that count layers: equal to the layer's index in every layer that has them."""
    wrong: set[tuple[str, str]] = set()
    seen: set[tuple[str, str]] = set()
    for index, layer in enumerate(stack):
        for name, key, value in _settings(layer):
            seen.add((name, key))
            if type(value) is not int or value != index:
                wrong.add((name, key))
    return seen - wrong


def _signature(layer: nn.Module, numbered: set[tuple[str, str]]) -> tuple[Any, ...]:
    """What makes two layers of one kind: classes, small settings and shapes, but not their number."""
    classes = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    settings = tuple(entry for entry in _settings(layer) if entry[:2] not in numbered)
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return classes, settings, shapes


def _shorten(model_class: type[nn.Module], config: Any, full: nn.Module, stack: str, depth: int) -> Any:
    """``config`` with the stack cut to ``depth``, or None where no attribute does that and only that."""
    length = len(full.get_submodule(stack))  # type: ignore[arg-type]
    counters = [key for key, value in vars(config).items() if type(value) is int and value == length]
    for key in counters:
        for with_lists in (True, False):
            candidate = copy.deepcopy(config)
            try:
                _set_depth(candidate, key, length, depth, with_lists)
                short = build_on_meta(model_class, candidate)
                if _is_prefix(short, full, stack, depth):
                    return candidate
            except Exception:  # a config refuses values in any way it likes; then this is not the counter
                continue
    return None


def _set_depth(config: Any, key: str, length: int, depth: int, with_lists: bool) -> None:
    if with_lists:
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == length and not name.startswith("_"):
                vars(config)[name] = value[:depth]
    setattr(config, key, depth)


def _is_prefix(short: nn.Module, full: nn.Module, stack: str, depth: int) -> bool:
    """Whether ``short`` is ``full`` with fewer layers in that stack and nothing else changed."""
    if len(short.get_submodule(stack)) != depth:  # type: ignore[arg-type]
        return False
    shapes = {name: tuple(p.shape) for name, p in full.named_parameters()}
    mine = {name: tuple(p.shape) for name, p in short.named_parameters()}
    prefix = f"{stack}."
    rest_of_full = {name for name in shapes if not name.startswith(prefix)}
    rest_of_mine = {name for name in mine if not name.startswith(prefix)}
    return rest_of_full >= rest_of_mine and all(shapes.get(name) == shape for name, shape in mine.items())


def embedding_size(config: Any) -> int:
    """Vocabulary of the model's ids.

    Raises:
        PlanError: the config names none.
    """
    for name in ("vocab_size", "src_vocab_size"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size > 0:
            return size
    raise PlanError("the config has no vocab_size: only text models can be planned")
