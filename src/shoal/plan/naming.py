"""What a weight is called while a plan is made: its pattern, or, where layers of one stack differ under one
pattern, the name of the weight in the first layer of its kind. Knows no data flow.

Linear and full attention may have the same names, and widths may change from layer to layer: such weights
are measured and split kind by kind, and the plan speaks of them by their exact names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from shoal.plan.calls import Recording
from shoal.plan.linears import is_splittable
from shoal.plan.types import Split, pattern_of

__all__ = ["Naming", "naming_of"]

_ALIKE = ("gather", "vocab", "replicate")  # of no region, so that nothing speaks of exact names


@dataclass(frozen=True, slots=True)
class Naming:
    """Keys by which a planner speaks of weights; without entries, their patterns."""

    keys: Mapping[str, str] = field(default_factory=dict)  # full name -> key, of weights that are told apart
    layers: Mapping[str, str] = field(default_factory=dict)  # full name -> its layer

    def key_of(self, name: str) -> str:
        """What a weight is called. A key and a pattern are called what they are."""
        return self.keys.get(name) or pattern_of(name)

    def names_of(self, key: str) -> list[str]:
        """Full names of the weights that a key means; none where it is a pattern."""
        return [name for name, own in self.keys.items() if own == key]

    def apply(self, recordings: Iterable[Recording]) -> None:
        """Call the weights that were used by their keys."""
        for recording in recordings if self.keys else ():
            for call in recording.calls:
                call.pattern = self.key_of(call.weight)

    def beside(self, name: str, key: str) -> str:
        """What another key means in the layer of a weight: a full name, or the pattern that it is."""
        layer = self.layers.get(name)
        return next((other for other in self.names_of(key) if self.layers[other] == layer), key)

    def spelled(self, splits: Mapping[str, Split]) -> dict[str, Split]:
        """Splits by what a plan calls weights: by pattern where all layers agree, else by exact names."""
        found: dict[str, Split] = {}
        for key, split in splits.items():
            names = self.names_of(key)
            found |= dict.fromkeys(names, split) if names else {key: split}
        groups: dict[str, list[str]] = {}
        for name in self.keys:
            groups.setdefault(pattern_of(name), []).append(name)
        for pattern, names in groups.items():
            told = {found.get(name) for name in names}
            agreed = told.pop() if len(told) == 1 else None
            if agreed is not None and agreed.op in _ALIKE:
                found = {name: own for name, own in found.items() if name not in names} | {pattern: agreed}
        return found


def naming_of(
    model: nn.Module, kinds: Mapping[str, tuple[int, ...]], left_alone: Collection[str] = ()
) -> Naming:
    """Which weights of a model (on meta is enough) are told apart.

    Args:
        model: the whole model.
        kinds: per stack of layers, for each layer the index of the first of its kind.
        left_alone: patterns that are not to be told apart, nor what is beside them.
    """
    keys: dict[str, str] = {}
    layers: dict[str, str] = {}
    for stack, first in kinds.items():
        weights = {kind: _weights(model.get_submodule(f"{stack}.{kind}")) for kind in sorted(set(first))}
        wished = {name for name in left_alone if name.startswith(f"{pattern_of(f'{stack}.0')}.")}
        for block in _differing(weights, f"{stack}.0", wished):
            # Kinds of layers that are alike in the block are one kind there.
            looks = {kind: _within(own, block) for kind, own in weights.items()}
            for index, kind in enumerate(first):
                alike = next(other for other, look in looks.items() if look == looks[kind])
                layer = f"{stack}.{index}"
                for rest, _ in model.get_submodule(layer).named_parameters(remove_duplicate=False):
                    if _is_below(rest, block):
                        keys[f"{layer}.{rest}"] = f"{stack}.{alike}.{rest}"
                        layers[f"{layer}.{rest}"] = layer
    return Naming(keys, layers)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A matrix, or more, of a layer: whose code uses it, and what it is."""

    block: str  # path within the layer
    user: str  # class of the block
    shape: tuple[int, ...]


def _weights(layer: nn.Module) -> dict[str, _Weight]:
    """By name within the layer."""
    modules = dict(layer.named_modules())
    found: dict[str, _Weight] = {}
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        block = owner.rpartition(".")[0] if is_splittable(modules[owner]) else owner
        if parameter.dim() >= 2:
            found[name] = _Weight(block, type(modules[block]).__qualname__, tuple(parameter.shape))
    return found


def _within(weights: Mapping[str, _Weight], block: str) -> dict[str, _Weight]:
    return {name: weight for name, weight in weights.items() if _is_below(name, block)}


def _differing(weights: Mapping[int, Mapping[str, _Weight]], layer: str, wished: set[str]) -> list[str]:
    """Blocks within a layer of which a weight differs among kinds of layers, in its shape or in whose code
    uses it, with what stands beside them in a block of the layer, which they feed; none within another.
    An empty path: the layer itself.

    What is numbered within a layer (experts) is taken together whatever the layer, and so is not told apart.
    """
    seen: dict[str, set[_Weight]] = {}
    for own in weights.values():
        for name, weight in own.items():
            seen.setdefault(name, set()).add(weight)
    found: list[str] = []
    blocks = {weight.block for what in seen.values() if len(what) > 1 for weight in what}
    for block in sorted({block.rpartition(".")[0] or block for block in blocks}):
        inside = [pattern_of(f"{layer}.{name}") for name in seen if _is_below(name, block)]
        is_numbered = any(name.count("*") > pattern_of(f"{layer}.x").count("*") for name in inside)
        if not is_numbered and not wished & set(inside) and not any(_is_below(block, o) for o in found):
            found.append(block)
    return found


def _is_below(name: str, block: str) -> bool:
    return not block or name.startswith(f"{block}.")
