"""Which checkpoint tensors make which model tensor. Reads no values and decides no split.

transformers keeps, per model type, how checkpoints' names and layouts differ from its modules' (names
changed, experts stored one by one, fused projections). Its own renaming is used, so that a checkpoint
loads here as it does there. What its converters do with the tensors is :mod:`shoal.checkpoint.convert`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.convert import Group, WholeModel, converted
from shoal.checkpoint.lazy import Lazy, Stored
from shoal.checkpoint.reader import CheckpointReader

__all__ = ["Matches", "match"]


@dataclass
class Matches:
    """Where each model tensor comes from."""

    sources: dict[str, Lazy] = field(default_factory=dict)  # by model name
    unexpected: list[str] = field(
        default_factory=list
    )  # as transformers renames them, no tensor of the model


def match(
    model: nn.Module,
    reader: CheckpointReader,
    wanted: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Matches:
    """Find the source of each wanted tensor.

    Args:
        model: a transformers model; any other module's names are taken as they are.
        reader: the checkpoint.
        wanted: the model's tensors by name, values not looked at.
        shapes: the whole shapes of the tensors of which ``model`` has only a part.
    """
    rename = _renamer(model, wanted)
    found, groups = Matches(), dict[str, Group]()
    for name in _in_order(reader.names()):
        target, pattern, converter = rename(name)
        if target not in wanted:
            first, *_ = targets = converter.target_patterns if converter is not None else [target]
            found.unexpected += [target.replace(first, other) for other in targets]
        elif converter is not None:
            stored = groups.setdefault(target, Group(converter, target)).stored
            stored.setdefault(pattern, []).append(Stored(reader, name))
        else:
            found.sources.setdefault(target, Stored(reader, name))
    whole = WholeModel(model, wanted, shapes or {})
    for group in groups.values():
        for name, source in converted(group, whole, list(wanted)).items():
            found.sources.setdefault(name, source)
    found.unexpected = list(dict.fromkeys(found.unexpected))
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
