"""What a policy asks of one model's weights. Knows no measurement and decides nothing: whether a wish is
right is for measuring and proving to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from shoal.errors import UsageError
from shoal.plan.linears import is_linear, is_splittable
from shoal.plan.policy import DERIVED, STYLES, Policy, nearest
from shoal.plan.types import Operation, pattern_of

__all__ = ["Wish", "wishes_of"]

_ON_ANY_MODULE = ("gather", "replicate", "experts")  # these may name a module that holds the weights


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for one weight."""

    op: Operation
    key: str  # of the policy, for messages


@dataclass(slots=True)
class _Names:
    """The model's weights and modules by name."""

    model: nn.Module
    modules: dict[str, nn.Module]
    weights: dict[str, nn.Module]  # of linears and embeddings, and raw parameters: full name -> its module
    followers: set[str]  # biases, which go where their weight goes
    counts: dict[str, int] = field(default_factory=dict)  # weights of a pattern

    @classmethod
    def of(cls, model: nn.Module) -> _Names:
        names = cls(model, dict(model.named_modules()), {}, set())
        for name, module in names.modules.items():
            for attribute, parameter in module._parameters.items():
                full = f"{name}.{attribute}" if name else attribute
                if parameter is None:
                    continue
                if is_splittable(module) and attribute != "weight":
                    names.followers.add(full)
                    continue
                names.weights[full] = module
                names.counts[pattern_of(full)] = names.counts.get(pattern_of(full), 0) + 1
        return names

    def kind(self, weight: str) -> str:
        module = self.weights[weight]
        if not is_splittable(module):
            return "raw"
        return "linear" if is_linear(module) else "embedding"

    def below(self, name: str) -> list[str]:
        """Weights of a module and of the modules in it."""
        return [weight for weight in self.weights if weight.startswith(f"{name}.")]


def wishes_of(policy: Policy, model: nn.Module) -> dict[str, Wish]:
    """Weight pattern -> what the policy asks for it, tied weights included.

    Args:
        policy: of any of the three shapes.
        model: the whole model; meta is enough.

    Raises:
        UsageError: a key that names nothing in the model, or a style its weight cannot have; the message
            has the key, and the nearest names there are.
    """
    names = _Names.of(model)
    found: dict[str, Wish] = {}
    covered: dict[str, set[str]] = {}
    for key, value in policy.entries:
        for weight, op in _targets(names, key, value):
            pattern = pattern_of(weight)
            wish = Wish(op, key)
            if found.setdefault(pattern, wish).op != op:
                raise _wrong(key, f"{pattern} as {op}, but {found[pattern].key} asks for {found[pattern].op}")
            covered.setdefault(pattern, set()).add(weight)
    for pattern, weights in covered.items():
        if found[pattern].op not in ("column", "row") and len(weights) < names.counts[pattern]:
            raise _wrong(found[pattern].key, f"a policy speaks of all layers alike: ask for {pattern}")
    return found | dict(_for_tied(names, found))


def _targets(names: _Names, key: str, value: str | tuple[str, ...]) -> Iterator[tuple[str, Operation]]:
    """(weight, operation) of one entry of a policy."""
    if isinstance(value, tuple):
        yield from ((weight, _fitting(names, key, weight, "row")) for weight in _in_blocks(names, key, value))
        return
    style = STYLES.get(value)
    if style is None:
        if _blocks(names, key):
            yield from _targets(names, key, (value,))
            return
        raise _wrong(key, f"unknown style {value!r}; {nearest(value, STYLES)}")
    matched = _matching(names, key)
    if not matched and _is_of_the_models_own_plan(names, key, value):
        return
    if not matched:
        known = [*map(pattern_of, names.modules), *map(pattern_of, names.weights)]
        if key.startswith("*."):  # any beginning: what there is ends so
            known = ["*." + ".".join(name.split(".")[-key.count(".") :]) for name in known]
        raise _wrong(key, f"nothing in the model has that name; {nearest(key, known)}")
    if style == DERIVED:
        return
    for name in matched:
        for weight, op in _weights_of(names, key, name, style):
            yield weight, _fitting(names, key, weight, op)


# ------------------------------------------------------------------ DeepSpeed's shape


def _blocks(names: _Names, class_name: str) -> list[str]:
    """Modules of a class, or of one that inherits from it."""
    return [
        name
        for name, module in names.modules.items()
        if any(base.__name__ == class_name for base in type(module).__mro__)
    ]


def _in_blocks(names: _Names, key: str, listed: Iterable[str]) -> Iterator[str]:
    blocks = _blocks(names, key)
    if not blocks:
        classes = [type(module).__name__ for module in names.modules.values()]
        raise _wrong(key, f"no module of the model is of that class; {nearest(key, classes)}")
    for entry in listed:
        wanted = entry.strip(".").removesuffix(".weight")
        hits = [weight for block in blocks for weight in _in_block(names, block, wanted)]
        if not hits:
            inside = {weight[len(block) + 1 :] for block in blocks for weight in names.below(block)}
            known = sorted(pattern_of(name).removesuffix(".weight") for name in inside)
            raise _wrong(key, f"{entry!r} names no linear in it; {nearest(wanted, known)}")
        yield from hits


def _in_block(names: _Names, block: str, wanted: str) -> list[str]:
    """Weights of that name in a block: the one directly there, else those whose names end so."""
    inside = {weight: weight[len(block) + 1 :].removesuffix(".weight") for weight in names.below(block)}
    exact = [weight for weight, name in inside.items() if wanted in (name, pattern_of(name))]
    return exact or [weight for weight, name in inside.items() if name.endswith(f".{wanted}")]


# ------------------------------------------------------------------ patterns


def _matching(names: _Names, key: str) -> list[str]:
    """Modules and parameters that a pattern names, with or without the prefix of the base model."""
    prefix = getattr(names.model, "base_model_prefix", "")
    known = [*names.modules, *names.weights, *names.followers]
    for candidate in (key, f"{prefix}.{key}" if prefix else key):
        body = re.escape(candidate.removeprefix("*.")).replace(r"\*", "[^.]*")
        expression = re.compile(rf"(.*\.)?{body}" if candidate.startswith("*.") else body)
        found = [name for name in known if expression.fullmatch(name)]
        if found:
            return found
    return []


def _is_of_the_models_own_plan(names: _Names, key: str, value: str) -> bool:
    """Whether transformers lists the entry for this model's class: not every config has every module."""
    config = getattr(names.model, "config", None)
    own = [getattr(names.model, attribute, None) for attribute in ("_tp_plan", "_ep_plan")]
    own += [getattr(config, attribute, None) for attribute in ("base_model_tp_plan", "base_model_ep_plan")]
    prefix = getattr(names.model, "base_model_prefix", "")
    bare = key.removeprefix(f"{prefix}.")
    return any(isinstance(plan, Mapping) and value in (plan.get(key), plan.get(bare)) for plan in own)


def _weights_of(names: _Names, key: str, name: str, style: str) -> Iterator[tuple[str, str]]:
    """The weights that a matched name stands for."""
    if name in names.followers:
        raise _wrong(key, "a bias goes where its weight goes; name the weight")
    if name in names.weights and style == "experts" and names.kind(name) == "raw":
        yield from _experts_of(names, key, _own_weights(names, name.rpartition(".")[0]))
        return
    if name in names.weights:
        yield name, style
        return
    module = names.modules[name]
    if is_splittable(module):
        yield f"{name}.weight", style
        return
    own = _own_weights(names, name)
    if style == "experts":
        yield from _experts_of(names, key, own)
    elif own and not any(True for _ in module.children()):
        yield from ((weight, style) for weight in own)
    elif style in _ON_ANY_MODULE:
        for weight in names.below(name):
            kind = names.kind(weight)
            if style == "replicate" or kind != "raw":
                yield weight, "vocab" if style == "gather" and kind == "embedding" else style
    else:
        inside = [pattern_of(weight).removesuffix(".weight") for weight in names.below(name)]
        raise _wrong(
            key, f"a {type(module).__name__} is no linear; name what is in it: {nearest(key, inside)}"
        )


def _own_weights(names: _Names, name: str) -> list[str]:
    """Parameters of a module itself."""
    return [weight for weight in names.below(name) if names.weights[weight] is names.modules[name]]


def _experts_of(names: _Names, key: str, own: list[str]) -> Iterator[tuple[str, str]]:
    """All parameters of a module that are stacked by expert: its 3-D ones, and others as long."""
    stacks = {weight: names.model.get_parameter(weight).shape for weight in own}
    counts = {shape[0] for shape in stacks.values() if len(shape) == 3}
    if len(counts) != 1:
        raise _wrong(
            key, "only experts that are stacked in 3-D parameters of one module can be dealt out whole"
        )
    yield from ((weight, "experts") for weight, shape in stacks.items() if shape[0] in counts)


def _fitting(names: _Names, key: str, weight: str, style: str) -> Operation:
    """The operation that a style means for a weight of its kind."""
    kind = names.kind(weight)
    pattern = pattern_of(weight)
    if kind == "embedding" and style == "row":
        return "vocab"  # the rows of a table are its inputs
    if kind == "linear" and style == "vocab":
        return "gather"  # a head that is split by vocabulary
    refusals = {
        ("embedding", "gather"): "an embedding is split by rows: say vocab",
        ("raw", "gather"): "no linear holds it that could gather: say column, row, experts or replicate",
        ("raw", "vocab"): "it is no embedding's: say column, row, experts or replicate",
        ("linear", "experts"): "a linear is no stack of experts; name the module that holds them",
        ("embedding", "experts"): "an embedding is no stack of experts; name the module that holds them",
    }
    if (kind, style) in refusals:
        raise _wrong(key, f"{pattern} as {style}: {refusals[kind, style]}")
    return cast(Operation, style)


def _for_tied(names: _Names, found: Mapping[str, Wish]) -> Iterator[tuple[str, Wish]]:
    """What a wish means for the weights that are the same parameter: they are cut alike, or not at all."""
    groups: dict[int, list[str]] = {}
    for weight, module in names.weights.items():
        parameter = module._parameters[weight.rpartition(".")[2]]
        groups.setdefault(id(parameter), []).append(weight)
    for group in groups.values():
        wished = [(pattern_of(name), found[pattern_of(name)]) for name in group if pattern_of(name) in found]
        for name in group:
            for _, wish in wished:
                if pattern_of(name) in found or wish.op not in ("gather", "vocab", "replicate"):
                    continue
                kind = names.kind(name)
                op: Operation = (
                    "vocab" if kind == "embedding" else "gather" if kind == "linear" else "replicate"
                )
                yield pattern_of(name), Wish("replicate" if wish.op == "replicate" else op, wish.key)
        if len({wish.op == "replicate" for _, wish in wished}) > 1:
            keys = " and ".join(wish.key for _, wish in wished)
            raise _wrong(keys, "they are one tied parameter, and can only be split or whole together")


def _wrong(key: str, message: str) -> UsageError:
    return UsageError(f"policy: {key}: {message}", field="policy")
