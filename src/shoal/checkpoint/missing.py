"""Tensors that a checkpoint lacks, and those it has too many of: which count, what is said, what is made.

The rules are transformers' (``PreTrainedModel._adjust_missing_and_unexpected_keys``). Knows no files.
"""

from __future__ import annotations

import copy
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from shoal.checkpoint.reader import Slice
from shoal.errors import CheckpointError

__all__ = ["initialise", "noteworthy_missing", "noteworthy_unexpected", "refuse_missing", "some"]

_logger = logging.getLogger("shoal.checkpoint")


def noteworthy_missing(model: nn.Module, missing: Iterable[str]) -> list[str]:
    """Missing names less those that the model's class says checkpoints may lack."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return [name for name in missing if not any(re.search(pattern, name) for pattern in patterns)]


def noteworthy_unexpected(model: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Unexpected names less those that the class ignores, and less old buffers that are computed now."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return [name for name in unexpected if not any(re.search(pattern, name) for pattern in patterns)]


def refuse_missing(names: Sequence[str]) -> None:
    """Raise CheckpointError if there are names."""
    if names:
        raise CheckpointError(
            f"the checkpoint lacks {len(names)} of the model's tensors: {some(names)}; "
            "is it for another model class, or incomplete?"
        )


def initialise(
    model: nn.Module,
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    slices: Mapping[str, Slice],
    put: Callable[[str, torch.Tensor], None],
) -> None:
    """Give tensors that have none the values that the model's class gives them.

    Each module is initialised whole, in float32, from random numbers that depend on its name alone, and
    then cut: ranks that hold the same part hold the same numbers.

    Args:
        model: the rank's part.
        names: of the tensors on meta, by module.
        shapes: whole shapes of those that are cut.
        slices: what the rank keeps of those.
        put: called with each name and its values, in float32 or the tensor's own integer dtype.
    """
    by_module: dict[str, list[str]] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(path, []).append(attribute)
    for path, attributes in by_module.items():
        module = _whole_module(model.get_submodule(path), path, attributes, shapes)
        _run_initialiser(model, module, path, set(attributes))
        for attribute in attributes:
            name = f"{path}.{attribute}".lstrip(".")
            put(name, _cut(getattr(module, attribute).detach(), slices.get(name)))


def _whole_module(
    module: nn.Module, path: str, attributes: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> nn.Module:
    """A copy of one module, without its children, in which some tensors are whole and zero."""
    own = copy.copy(module)
    own._parameters, own._buffers = dict(module._parameters), dict(module._buffers)
    for attribute in attributes:
        old = getattr(own, attribute)
        shape = shapes.get(f"{path}.{attribute}".lstrip("."), tuple(old.shape))
        values = torch.zeros(shape, dtype=torch.float32 if old.is_floating_point() else old.dtype)
        if attribute in own._parameters:
            own._parameters[attribute] = nn.Parameter(values, requires_grad=False)
        else:
            own._buffers[attribute] = values
    return own


@torch.no_grad()
def _run_initialiser(model: nn.Module, module: nn.Module, path: str, attributes: set[str]) -> None:
    """Let the model's class set a module's tensors; those that are there already are marked as such."""
    initialiser = getattr(_nearest_model(model, path), "_init_weights", None)
    if initialiser is None:
        return
    others = [
        tensor
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and attribute not in attributes
    ]
    for tensor in others:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(path.encode()))
        initialiser(module)


def _nearest_model(model: nn.Module, path: str) -> nn.Module:
    """The innermost model with an initialiser of its own around a module: models are made of models."""
    nearest = model
    parts = path.split(".") if path else []
    for depth in range(1, len(parts)):
        outer = model.get_submodule(".".join(parts[:depth]))
        nearest = outer if hasattr(outer, "_init_weights") else nearest
    return nearest


def _cut(values: torch.Tensor, part: Slice | None) -> torch.Tensor:
    if part is None:
        return values
    return torch.cat([values.narrow(part.dim, start, stop - start) for start, stop in part.ranges], part.dim)


def some(names: Sequence[str], count: int = 8) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
