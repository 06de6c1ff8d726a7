"""Which checkpoint tensors make which model tensor. Reads no values and decides no split.

transformers keeps, per model type, how checkpoints' names and layouts differ from its modules' (names
changed, experts stored one by one, fused projections). Its own renaming is used, so that a checkpoint
loads here as it does there; layout changes that only join, stack, cut or turn become
:mod:`shoal.checkpoint.lazy` descriptions, so that ranks read their part; the rest is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.lazy import Computed, Cut, Joined, Lazy, Stacked, Stored, Turned
from shoal.checkpoint.reader import CheckpointReader
from shoal.errors import CheckpointError

__all__ = ["Matches", "match"]


@dataclass
class Matches:
    """Where each model tensor comes from."""

    sources: dict[str, Lazy] = field(default_factory=dict)  # by model name
    unexpected: list[str] = field(default_factory=list)  # checkpoint names no model tensor wants


@dataclass
class _Group:
    """Checkpoint tensors that one of transformers' converters turns into one or more model tensors."""

    converter: Any  # transformers' WeightConverter
    names: dict[str, list[str]] = field(default_factory=dict)  # by the pattern they matched, in order


def match(model: nn.Module, reader: CheckpointReader, wanted: Mapping[str, torch.Tensor]) -> Matches:
    """Find the source of each wanted tensor.

    Args:
        model: a transformers model; any other module's names are taken as they are.
        reader: the checkpoint.
        wanted: the model's tensors by name, values not looked at.
    """
    rename = _renamer(model, wanted)
    found, groups = Matches(), dict[str, _Group]()
    for name in _in_order(reader.names()):
        target, pattern, converter = rename(name)
        if converter is not None:
            names = groups.setdefault(target, _Group(converter)).names
            names.setdefault(pattern, []).append(name)
        elif target in wanted:
            found.sources.setdefault(target, Stored(reader, name))
        else:
            found.unexpected.append(name)
    for target, group in groups.items():
        sources = _converted(model, reader, target, group)
        for name, source in sources.items():
            if name in wanted:
                found.sources.setdefault(name, source)
        if not any(name in wanted for name in sources):
            found.unexpected += [name for names in group.names.values() for name in names]
    return found


_Rename = Callable[[str], tuple[str, str, Any]]
"""A checkpoint name -> (model name, pattern matched, converter or None)."""


def _renamer(model: nn.Module, wanted: Mapping[str, torch.Tensor]) -> _Rename:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return lambda name: (name, "", None)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix or None

    def rename(name: str) -> tuple[str, str, Any]:
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:  # renamed though it need not be: an old name still in use
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        return target, pattern or "", by_pattern.get(pattern)

    return rename


def _in_order(names: tuple[str, ...]) -> list[str]:
    """Names with their numbers counted, not spelt: expert 2 before expert 10."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def _converted(model: nn.Module, reader: CheckpointReader, target: str, group: _Group) -> dict[str, Lazy]:
    """The model tensors a group makes, by name. ``target`` is the name its first target pattern gives."""
    patterns = [pattern for pattern in group.converter.source_patterns if pattern in group.names]
    pieces = [[Stored(reader, name) for name in group.names[pattern]] for pattern in patterns]
    targets = group.converter.target_patterns
    names = [target.replace(targets[0], pattern, 1) for pattern in targets]
    made = _described([*map(_operation, group.converter.operations)], pieces, len(targets))
    if made is None:
        made = [Computed(_computation(model, reader, target, group, name)) for name in names]
    return dict(zip(names, made, strict=True))


def _operation(operation: Any) -> tuple[str, Any]:
    """A conversion operation as (kind, its number or numbers); kind "" if it is none of the simple ones."""
    kind = type(operation).__name__
    if getattr(operation, "num_shards_attribute", None) is not None or getattr(
        operation, "check_dims", False
    ):
        return "", None
    if kind in ("MergeModulelist", "Concatenate", "Chunk"):
        return kind, operation.dim
    return (kind, (operation.dim0, operation.dim1)) if kind == "Transpose" else ("", None)


def _described(
    operations: list[tuple[str, Any]], pieces: list[list[Stored]], num_targets: int
) -> list[Lazy] | None:
    """The tensors made, if the operations are ones that can be read in part; else None."""
    kinds = [kind for kind, _ in operations]
    if kinds == ["MergeModulelist"] and operations[0][1] == 0 and len(pieces) == num_targets == 1:
        return [Stacked(pieces[0])]
    if kinds == ["MergeModulelist", "Concatenate"] and operations[0][1] == 0 and num_targets == 1:
        return [Joined([Stacked(experts) for experts in pieces], operations[1][1])]
    if kinds == ["Concatenate"] and num_targets == 1:
        return [Joined([piece for matched in pieces for piece in matched], operations[0][1])]
    if len(pieces) == 1 and len(pieces[0]) == 1:
        if kinds == ["Chunk"]:
            return _chunks(pieces[0][0], operations[0][1], num_targets)
        if kinds == ["Transpose"] and num_targets == 1:
            return [Turned(pieces[0][0], *operations[0][1])]
    return None


def _chunks(source: Lazy, dim: int, count: int) -> list[Lazy] | None:
    size = source.shape[dim]
    if size % count:
        return None
    each = size // count
    return [Cut(source, dim, part * each, (part + 1) * each) for part in range(count)]


def _computation(
    model: nn.Module, reader: CheckpointReader, target: str, group: _Group, name: str
) -> Callable[[], torch.Tensor]:
    """transformers' own conversion of a group, for one of the tensors it makes."""

    def compute() -> torch.Tensor:
        converter = deepcopy(group.converter)
        for pattern, stored in group.names.items():
            for stored_name in stored:
                converter.add_tensor(target, stored_name, pattern, reader.read(stored_name))
        try:
            made = converter.convert(target, model=model, config=model.config)[name]
        except (
            Exception
        ) as error:  # whatever a conversion of transformers' raises, this tensor is not loadable
            raise CheckpointError(
                f"{name}: transformers could not convert it from {stored} ({error!r})"
            ) from error
        values: torch.Tensor = made[0] if isinstance(made, list) else made
        return values

    return compute
