"""Builds models without their weights: whole ones on meta, and short ones of which only what lies
between the linears has values. Knows no plan.

Nothing global is touched: creation is redirected by torch function modes, which belong to the thread,
and random numbers come from a generator of our own.
"""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.errors import PlanError
from shoal.plan.linears import is_linear, is_splittable
from shoal.plan.random import OwnRandom, own_random
from shoal.plan.settings import children, integers, vocabulary_size, with_values
from shoal.plan.types import pattern_of

__all__ = [
    "BigOnMeta",
    "Cut",
    "build_on_meta",
    "build_probe",
    "build_with_generator",
    "building",
    "cut_depth",
    "materialise",
    "shorten_lengths",
]

_BUILDING = threading.RLock()

_BIG = 1 << 16  # elements from which uninitialised memory goes to meta
_BIG_CONSTANT = 1 << 24  # the same for zeros and ones, which may be masks that are read
_MOST_VALUES = 1 << 22  # elements up to which a raw parameter can be given values
_CHARACTERS = 128  # of models that read characters: enough to tell them apart


class BigOnMeta(TorchFunctionMode):
    """Big fresh tensors are created on meta."""

    _EMPTY = (torch.empty, torch.randn, torch.rand)
    _CONSTANT = (torch.zeros, torch.ones, torch.full)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        limit = _BIG if func in self._EMPTY else _BIG_CONSTANT if func in self._CONSTANT else None
        if limit is not None and kwargs.get("dtype") is not torch.bool and _numel(args, kwargs) >= limit:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _numel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    shape = kwargs.get("size", args)
    if len(shape) >= 1 and isinstance(shape[0], (tuple, list)):
        shape = shape[0]
    return math.prod(int(size) for size in shape if isinstance(size, int))


def private_config(
    model_class: type[nn.Module], config: Any, attention: str = "eager", experts: str | None = "eager"
) -> Any:
    """A copy of the config that computes in the plainest way, unless another attention is asked for, or
    experts as the config itself says (None). Padding has a token where classifiers want one to take several
    texts at once.
    """
    own = copy.deepcopy(config)
    own._attn_implementation = attention
    if experts is not None and hasattr(own, "_experts_implementation"):
        own._experts_implementation = experts
    if "SequenceClassifier" in str(inspect.signature(model_class.forward).return_annotation):
        for _, inner in children(own):
            if getattr(inner, "pad_token_id", 0) is None:
                inner.pad_token_id = 0
    return own


@contextmanager
def building() -> Iterator[None]:
    """One model at a time in this process: transformers' constructors set the default dtype and replace
    ``torch.nn.init`` functions for a while, globally, and two threads that do so leave them replaced.
    """
    with _BUILDING:
        yield


class _Uninitialised(TorchFunctionMode):
    """``torch.nn.init`` does nothing: on meta there is nothing to fill, and many experts take seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" and func.__name__.endswith("_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def build_on_meta(model_class: type[nn.Module], config: Any) -> nn.Module:
    """The whole model, every tensor on meta: names, shapes and ties, no storage."""
    with building(), torch.device("meta"), _Uninitialised():
        return model_class(private_config(model_class, config)).eval()


def build_with_generator(
    model_class: type[nn.Module],
    config: Any,
    generator: torch.Generator,
    attention: str = "eager",
    experts: str | None = "eager",
) -> nn.Module:
    """The model with real, random weights; the thread's own random state is left alone."""
    with building(), OwnRandom(generator):
        return model_class(private_config(model_class, config, attention, experts)).eval()


def build_probe(model_class: type[nn.Module], config: Any) -> nn.Module:
    """The model with its weights on meta and real, random values for what lies between them.

    Norms and biases are random (zeros and ones would hide a wrong slice) and ask for gradients; rotary
    tables and masks hold what the model computed. Every other parameter of two dimensions or more is on
    meta until it turns out to be no factor of a product: see :func:`materialise`.
    """
    generator = torch.Generator().manual_seed(1)
    with building(), own_random(), BigOnMeta():
        model = model_class(private_config(model_class, config)).eval()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = _probe_parameter(module, parameter, generator)
    return model


def _probe_parameter(module: nn.Module, parameter: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    if parameter.is_meta:
        return parameter  # left as it is, so that ties stay
    if parameter.dim() >= 2:
        return nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)
    # A gain keeps its mean of one, so that the signal neither dies nor explodes.
    mean = 1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0
    return _random_values(parameter.shape, mean, generator)


def _random_values(shape: torch.Size, mean: float, generator: torch.Generator) -> nn.Parameter:
    spread = min(0.2, 2.0 / math.sqrt(max(1, shape[-1]))) if len(shape) > 1 else 0.2
    return nn.Parameter(torch.empty(shape).normal_(mean, spread, generator=generator), requires_grad=True)


def materialise(model: nn.Module, patterns: Container[str]) -> int:
    """Give values to parameters of these patterns that are not too big: raw ones, and tables of embeddings.

    Returns:
        how many parameters got values; those that are tied stay tied.
    """
    generator = torch.Generator().manual_seed(2)
    given: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta or is_linear(module):
                continue
            full_name = f"{module_name}.{name}" if module_name else name
            if pattern_of(full_name) in patterns and parameter.numel() <= _MOST_VALUES:
                if id(parameter) not in given:
                    given[id(parameter)] = (parameter, _random_values(parameter.shape, 0.0, generator))
                module._parameters[name] = given[id(parameter)][1]
    return len(given)


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
    for name, stack in _stacks(full):
        numbered = _numbered(stack)
        signatures = [_signature(layer, numbered) for layer in stack]
        kinds[name] = tuple(signatures.index(signature) for signature in signatures)
    # The stack that needs most layers first: one counter may shorten several.
    for name, first in sorted(kinds.items(), key=lambda item: -max(item[1])):
        depth = max(2, max(first) + 1)
        if depth < len(first):
            own = _shorten(model_class, own, full, name, depth) or own
    short = build_on_meta(model_class, own)
    return Cut(own, kinds, {name: _length(short, name) for name in kinds})


def _length(model: nn.Module, stack: str) -> int:
    layers = model.get_submodule(stack)
    return len(layers) if isinstance(layers, nn.ModuleList) else 0


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
    length = _length(full, stack)
    counters = [path for path, value in integers(config) if value == length]
    for path in counters:
        for with_lists in (True, False):
            candidate = with_values(config, {path: depth})
            if with_lists:
                _shorten_lists(candidate, length, depth)
            try:
                _check(candidate)
                short = build_on_meta(model_class, candidate)
                if _is_prefix(short, full, stack, depth):
                    return candidate
            except Exception:  # a config refuses values in any way it likes; then this is not the counter
                continue
    return None


def _check(config: Any) -> None:
    """A config's own checks, which its constructor makes and a changed value passes by.

    Raises:
        Exception: what they raise; layers may be counted by parts, whose sum the whole must be.
    """
    check = getattr(config, "validate_architecture", None)
    if callable(check):
        check()


def _shorten_lists(config: Any, length: int, depth: int) -> None:
    """Cut the lists that have an entry per layer, in the config and those inside it."""
    for _, inner in children(config):
        for name, value in list(vars(inner).items()):
            if isinstance(value, list) and len(value) == length and not name.startswith("_"):
                vars(inner)[name] = value[:depth]


def _is_prefix(short: nn.Module, full: nn.Module, stack: str, depth: int) -> bool:
    """Whether ``short`` is ``full`` with fewer layers in that stack and nothing else changed, but for
    features that there are so many of per layer.
    """
    if _length(short, stack) != depth:
        return False
    shapes, mine = _shapes(full), _shapes(short)
    prefix, length = f"{stack}.", _length(full, stack)

    def is_same(name: str, shape: tuple[int, ...]) -> bool:
        whole = shapes.get(name, ())
        if name.startswith(prefix) or len(whole) != len(shape):
            return whole == shape
        return all(a == b or a * depth == b * length for a, b in zip(whole, shape, strict=True))

    rest_of_full = {name for name in shapes if not name.startswith(prefix)}
    rest_of_mine = {name for name in mine if not name.startswith(prefix)}
    return rest_of_full >= rest_of_mine and all(is_same(name, shape) for name, shape in mine.items())


# ------------------------------------------------------------------ short blocks, few latents

_LENGTH_WORDS = ("block", "chunk", "window", "radius", "latents")  # in names of settings that count tokens
_SHORT = (8, 16, 4, 32, 6, 10)  # what such a setting becomes: the first that is no other setting's value


def shorten_lengths(model_class: type[nn.Module], config: Any) -> Any:
    """A config with blocks, windows and the like of a few tokens: then few tokens run all the code.

    Only settings that no width depends on are changed, as measured: every parameter keeps its shape, but for
    first dimensions that count what the setting counts (latents). Where nothing can be changed, the config
    itself comes back.
    """
    model = build_on_meta(model_class, config)
    shapes, tables = _shapes(model), _tables(model)
    taken = {value for _, value in integers(config)}
    length = next((size for size in _SHORT if size not in taken), _SHORT[0])
    for path, value in list(integers(config)):
        name = str(next(key for key in reversed(path) if isinstance(key, str)))
        if value <= length or "layer" in name or not any(word in name for word in _LENGTH_WORDS):
            continue
        shorter = with_values(config, {path: length})
        try:
            mine = _shapes(build_on_meta(model_class, shorter))
        except Exception:  # a config refuses values in any way it likes; then this one stays
            continue
        changed = {key: shape for key, shape in mine.items() if shapes.get(key) != shape}
        counts = {key: (length, *shapes[key][1:]) for key in tables if shapes[key][0] == value}
        if mine.keys() == shapes.keys() and all(counts.get(key) == shape for key, shape in changed.items()):
            config = shorter
    return config


def _tables(model: nn.Module) -> set[str]:
    """Names of the matrices that no linear and no embedding holds: their first dimension may count tokens."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dim() >= 2 and not is_splittable(module)
    }


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def embedding_size(config: Any) -> int:
    """Vocabulary of the model's ids; of a model that has special tokens and reads characters, that of ASCII.

    Raises:
        PlanError: the config names neither.
    """
    size = vocabulary_size(config)
    if size is not None:
        return size
    if any(name.endswith("_token_id") and type(value) is int for name, value in vars(config).items()):
        return _CHARACTERS
    raise PlanError("the config has no vocab_size: only text models can be planned")
