"""transformers' conversions of checkpoint layouts, carried out on descriptions instead of tensors.

An operation that only moves values (stacks, joins, cuts, turns, reorders) becomes a description of
:mod:`shoal.checkpoint.lazy`, so that a rank reads its part of what was stored. One that is unknown here, or
calculates, is transformers' own: it gets the whole tensors, and its result is cut. Knows no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.checkpoint.lazy import Computed, Cut, Joined, Lazy, Permuted, Stacked, Stored, Turned
from shoal.errors import CheckpointError

__all__ = ["Group", "WholeModel", "converted"]

_Value = Lazy | list[Any]  # as in transformers: what patterns matched is a list, what operations made is not
_Named = dict[str, _Value]  # by pattern


@dataclass
class Group:
    """Checkpoint tensors that one of transformers' converters turns into one or more model tensors."""

    converter: Any  # transformers' WeightConverter
    target: str  # the model's name that the converter's first target pattern gives
    stored: dict[str, list[Stored]] = field(default_factory=dict)  # by the pattern they matched, in order


class WholeModel:
    """A model as conversions may ask about it: with the shapes it has before a plan cuts it.

    Args:
        model: the model, perhaps a rank's part of it.
        wanted: its tensors by name.
        shapes: the whole shapes of those that are cut.
    """

    def __init__(
        self, model: Any, wanted: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._model = model
        self._wanted = wanted
        self._shapes = shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        """A tensor on meta, whole."""
        if name not in self._wanted:
            raise AttributeError(name)
        return torch.empty(self.shape(name), dtype=self._wanted[name].dtype, device="meta")

    get_parameter_or_buffer = get_buffer = get_parameter

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        return self._shapes.get(name, tuple(self._wanted[name].shape))


def converted(group: Group, model: WholeModel, names: Sequence[str]) -> dict[str, Lazy]:
    """The model tensors a group makes, by name.

    Args:
        group: what was stored, and its converter.
        model: asked for shapes and its config.
        names: the model's names that are wanted; others need not be kept.
    """
    try:
        made = _described(group, model)
    except _NotDescribedError:
        conversion = _Conversion(group, model, set(names))
        made = {name: Computed(conversion.result(name)) for name in _target_names(group)}
    return {name: source for name, source in made.items() if name in names}


def _target_names(group: Group) -> list[str]:
    """The model's names of everything a converter makes."""
    first, *_ = patterns = group.converter.target_patterns
    return [group.target.replace(first, pattern, 1) for pattern in patterns]


# ------------------------------------------------------------------ on descriptions


class _NotDescribedError(Exception):
    """An operation that is not one of those that only move values, or not used as such."""


def _described(group: Group, model: WholeModel) -> dict[str, Lazy]:
    values: _Named = {pattern: list(stored) for pattern, stored in group.stored.items()}
    for operation in group.converter.operations:
        name, settings = type(operation).__name__, set(vars(operation))
        known = _OPERATIONS.get(name)
        is_theirs = type(operation).__module__ == "transformers.core_model_loading"
        if known is None or not is_theirs or not settings <= known.settings:
            raise _NotDescribedError(name)
        values = known.carry_out(operation, values, group, model)
    made = {pattern: _single(value) for pattern, value in values.items()}
    full = group.target.replace("*.", "0.")
    inside = next((pattern for pattern in made if pattern in full), None)
    if inside is None:
        raise _NotDescribedError(f"no target of {group.target}")
    prefix, _, suffix = full.partition(inside)
    return {f"{prefix}{pattern}{suffix}": source for pattern, source in made.items()}


def _single(value: _Value) -> Lazy:
    """The one tensor a value holds."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise _NotDescribedError(f"{len(value)} tensors where one was expected")
    only: Lazy = value[0]
    return only


def _only(values: _Named) -> Lazy:
    if len(values) != 1:
        raise _NotDescribedError(f"{len(values)} tensors where one was expected")
    return _single(next(iter(values.values())))


def _merge(operation: Any, values: _Named, group: Group, model: WholeModel) -> _Named:
    """Lists become stacks, under the target's name if there is one list only."""
    targets = group.converter.target_patterns
    if len(values) == 1 and len(targets) != 1:
        raise _NotDescribedError("one list for several targets")
    return {
        targets[0] if len(values) == 1 else pattern: (
            Stacked(value, operation.dim) if isinstance(value, list) else value
        )
        for pattern, value in values.items()
    }


def _concatenate(operation: Any, values: _Named, group: Group, model: WholeModel) -> _Named:
    """Everything end to end, in the order of the source patterns."""
    targets = group.converter.target_patterns
    ordered = [values[pattern] for pattern in group.converter.source_patterns if pattern in values]
    if len(targets) != 1 or len(ordered) != len(values):
        raise _NotDescribedError("joined from other patterns than the sources")
    parts = [part for value in ordered for part in (value if isinstance(value, list) else [value])]
    return {targets[0]: Joined(parts, operation.dim % len(parts[0].shape))}


def _chunk(operation: Any, values: _Named, group: Group, model: WholeModel) -> _Named:
    """Equal parts, as ``torch.chunk`` makes them."""
    source, targets = _only(values), group.converter.target_patterns
    dim = operation.dim % len(source.shape)
    size = source.shape[dim]
    if operation.num_shards_attribute is not None or size % len(targets):
        raise _NotDescribedError("parts that are not one for each target")
    each = size // len(targets)
    return {target: Cut(source, dim, part * each, (part + 1) * each) for part, target in enumerate(targets)}


def _split(operation: Any, values: _Named, group: Group, model: WholeModel) -> _Named:
    """Parts as large as the model's own tensors."""
    source, names = _only(values), _target_names(group)
    dim = operation.dim % len(source.shape)
    made: _Named = {}
    start = 0
    for pattern, name in zip(group.converter.target_patterns, names, strict=True):
        try:
            stop = start + model.get_parameter(name).shape[dim]
        except AttributeError as error:
            raise _NotDescribedError(f"the model has no {name}") from error
        made[pattern] = Cut(source, dim, start, stop)
        start = stop
    if start != source.shape[dim]:
        raise _NotDescribedError("the targets are not as large as the source")
    return made


def _transpose(operation: Any, values: _Named, group: Group, model: WholeModel) -> _Named:
    """Two dimensions exchanged, or, where it says to look, left as they are if they fit already."""
    source, converter = _only(values), group.converter
    pattern = converter.target_patterns[0]
    if len(converter.target_patterns) > 1:
        if len(converter.source_patterns) > 1:
            raise _NotDescribedError("several to several")
        pattern = converter.source_patterns[0]
    if operation.check_dims and source.shape == model.get_parameter(group.target).shape:
        return {pattern: source}
    dims = len(source.shape)
    return {pattern: Turned(source, operation.dim0 % dims, operation.dim1 % dims)}


def _interleave(operation: Any, values: _Named, group: Group, model: WholeModel) -> _Named:
    """Even indices before odd ones; the inverse: first and second half by turns."""
    source = _only(values)
    dim = operation.dim % len(source.shape)
    size = source.shape[dim]
    if size % 2:
        raise _NotDescribedError("an odd size")
    rows = torch.arange(size).reshape((2, size // 2) if operation.inverse else (size // 2, 2))
    return {group.converter.target_patterns[0]: Permuted(source, dim, rows.T.reshape(-1))}


def _permute_for_rope(operation: Any, values: _Named, group: Group, model: WholeModel) -> _Named:
    """Rows of the named tensors reordered within each head; the order is transformers' own."""
    converter, made = group.converter, _Named()
    permute = getattr(operation, "_permute_for_rope", None)
    if permute is None:
        raise _NotDescribedError("transformers before 5.24, where it works otherwise")
    for pattern, value in values.items():
        source, names = _single(value), operation.permute_layer_names
        if names is None or any(name in pattern for name in names):
            rows = permute(torch.arange(source.shape[0]), model.config)
            source = Permuted(source, 0, rows)
        counts = (len(converter.source_patterns), len(converter.target_patterns))
        if min(counts) > 1:
            raise _NotDescribedError("several to several")
        made[converter.target_patterns[0] if counts == (1, 1) else pattern] = source
    return made


@dataclass(frozen=True)
class _Known:
    """An operation of transformers', and the settings of it that are understood."""

    carry_out: Callable[[Any, _Named, Group, WholeModel], _Named]
    settings: frozenset[str]


_OPERATIONS = {
    "MergeModulelist": _Known(_merge, frozenset({"dim"})),
    "Concatenate": _Known(_concatenate, frozenset({"dim", "num_shards_attribute"})),
    "Chunk": _Known(_chunk, frozenset({"dim", "num_shards_attribute"})),
    "Split": _Known(_split, frozenset({"dim"})),
    "Transpose": _Known(_transpose, frozenset({"dim0", "dim1", "check_dims"})),
    "Interleave": _Known(_interleave, frozenset({"dim", "inverse"})),
    "PermuteForRope": _Known(
        _permute_for_rope, frozenset({"subconfig_key", "inverse", "permute_layer_names"})
    ),
}


# ------------------------------------------------------------------ on tensors


class _Conversion:
    """transformers' own conversion of a group, done once for all the tensors it makes.

    Results are kept until each wanted one was taken.
    """

    def __init__(self, group: Group, model: WholeModel, names: set[str]) -> None:
        self._group = group
        self._model = model
        self._names = names
        self._made: dict[str, torch.Tensor] = {}
        self._is_first = True

    def result(self, name: str) -> Callable[[bool], torch.Tensor]:
        def compute(is_last: bool) -> torch.Tensor:
            if name not in self._made:
                self._made |= self._convert(name)
            return self._made.pop(name) if is_last else self._made[name]

        return compute

    def _convert(self, wanted: str) -> dict[str, torch.Tensor]:
        group, converter = self._group, deepcopy(self._group.converter)
        # The whole tensors, converted to the model's dtype first, as transformers does.
        dtype = self._model.get_parameter(group.target).dtype
        for pattern, stored in group.stored.items():
            for entry in stored:
                values = entry.reader.read(entry.name, dtype=dtype)
                converter.add_tensor(group.target, entry.name, pattern, values)
        kept = self._names if self._is_first else {wanted}
        self._is_first = False
        try:
            made = converter.convert(group.target, model=self._model, config=self._model.config)
            taken = {name: values for name, values in made.items() if name in kept}
            if wanted not in taken:
                raise KeyError(wanted)
        except Exception as error:  # whatever a conversion of transformers' raises, it cannot be loaded
            names = {pattern: [entry.name for entry in stored] for pattern, stored in group.stored.items()}
            raise CheckpointError(
                f"{wanted}: transformers could not convert it from {names} ({error!r})"
            ) from error
        return {
            name: values[0] if isinstance(values, (list, tuple)) else values for name, values in taken.items()
        }
