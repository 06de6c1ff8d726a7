"""Giving a model its weights: each tensor, or this rank's part of it, read, converted and set in place.

Knows no plan beyond the ranges it is handed. Tensors are set one at a time, straight into their final
memory, so the model is never held twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shoal.checkpoint.lazy import Lazy
from shoal.checkpoint.match import match
from shoal.checkpoint.reader import CheckpointReader, Ranges, Slice, sliced_shape
from shoal.errors import CheckpointError

__all__ = ["LoadReport", "load_weights"]

_logger = logging.getLogger("shoal.checkpoint")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was read."""

    bytes_read: int  # of tensor data, from checkpoint files
    missing: tuple[str, ...]  # model tensors the checkpoint lacks and the model makes itself
    unexpected: tuple[str, ...]  # checkpoint tensors the model has no place for


@dataclass(frozen=True, slots=True)
class _Target:
    """What every tensor is loaded with."""

    slices: Mapping[str, Slice]
    device: torch.device
    dtype: torch.dtype | None
    keep_float32: re.Pattern[str] | None


def load_weights(
    model: nn.Module,
    reader: CheckpointReader,
    slices: Mapping[str, Slice] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Fill a model whose parameters are on meta, and already of this rank's shapes.

    Args:
        model: a transformers model; its tensors' names are the unsharded model's.
        reader: the checkpoint.
        slices: by model name (each name of a tied tensor), the ranges this rank keeps; others are whole.
        device: where the weights go.
        dtype: of floating-point tensors, but for those the model's class keeps in float32; None: each
            tensor's dtype in ``model``.
        progress: called with tensors done and tensors in all.

    Returns:
        bytes read and the names that did not match, as ``from_pretrained`` counts them.

    Raises:
        CheckpointError: a weight is missing, a shape does not fit, or a file is damaged.
    """
    wanted = _wanted(model)
    matches = match(model, reader, wanted)
    target = _Target(slices or {}, torch.device(device), dtype, _float32_names(model, dtype))
    bytes_before = reader.bytes_read
    missing: list[str] = []
    groups = _tied_groups(model, wanted)
    for done, group in enumerate(groups):
        missing += _load_group(model, group, wanted, matches.sources, target)
        if progress is not None:
            progress(done + 1, len(groups))
    _make_missing(model, missing, target)
    left = [name for name, tensor in _all_tensors(model) if tensor.is_meta]
    assert not left, f"still without values after loading: {left}"
    unexpected = _noteworthy(model, matches.unexpected)
    if unexpected:
        _logger.info(
            "the checkpoint has %d tensors the model does not use: %s", len(unexpected), _some(unexpected)
        )
    return LoadReport(reader.bytes_read - bytes_before, tuple(missing), tuple(unexpected))


def _wanted(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, a tied one under each of its names."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if torch.is_tensor(value)}


def _all_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _float32_names(model: nn.Module, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """The parameters a model's class keeps in float32 (transformers' ``_keep_in_fp32_modules``)."""
    keep: set[str] = set()
    if dtype is torch.float16:
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        keep |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return re.compile("|".join(name.replace("*", ".*") for name in sorted(keep))) if keep else None


def _tied_groups(model: nn.Module, wanted: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names that stand for one tensor: the same object, or tied by the model's class. The owner is first."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    groups: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        owner = tied.get(name, name)
        key = id(wanted[owner]) if owner in wanted else id(tensor)
        groups.setdefault(key, []).append(name)
    return [sorted(group, key=lambda name: name in tied) for group in groups.values()]


def _load_group(
    model: nn.Module,
    group: list[str],
    wanted: Mapping[str, torch.Tensor],
    sources: Mapping[str, Lazy],
    target: _Target,
) -> list[str]:
    """Load one tensor under all its names; return the names if the checkpoint has none of them.

    Names that the checkpoint stores apart, with different values, become tensors of their own.
    """
    stored = [name for name in group if name in sources]
    if not stored:
        return group
    owner = stored[0]
    first = _read(owner, sources[owner], wanted[owner], target)
    _set(model, owner, first)
    for name in group:
        if name == owner:
            continue
        same_part = wanted[name] is wanted[owner] or target.slices.get(name) == target.slices.get(owner)
        if name in sources or not same_part or wanted[name].shape != wanted[owner].shape:
            own = _read(name, sources.get(name, sources[owner]), wanted[name], target)
            if not same_part or not torch.equal(own, first):
                if same_part:
                    _untie(model, name, owner)
                _set(model, name, own)
                continue
        _share(model, name, owner)
    return []


def _untie(model: nn.Module, name: str, owner: str) -> None:
    """Note, in the log and the model, that tensors its class ties differ in the checkpoint."""
    _logger.warning("%s is tied to %s, but the checkpoint's values differ: kept apart", name, owner)
    getattr(model, "all_tied_weights_keys", {}).pop(name, None)


def _read(name: str, source: Lazy, meta: torch.Tensor, target: _Target) -> torch.Tensor:
    part = target.slices.get(name)
    try:
        whole = source.shape
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    ranges: Ranges = {} if part is None else {part.dim % max(len(whole), 1): part.ranges}
    inside = all(0 <= a <= b <= whole[dim] for dim, kept in ranges.items() for a, b in kept)
    size = None if part is None else getattr(part, "size", None)
    if part is not None and size is not None:
        inside = inside and whole[part.dim % max(len(whole), 1)] == size
    if not inside or sliced_shape(whole, ranges) != tuple(meta.shape):
        kept = f" of which {[list(kept) for kept in ranges.values()]} are kept" if ranges else ""
        raise CheckpointError(
            f"{name}: the checkpoint's shape {list(whole)}{kept} does not fit the model's {list(meta.shape)}"
        )
    out = torch.empty(meta.shape, dtype=_dtype(name, meta, target), device=target.device)
    source.read_into(ranges, out)
    return out


def _dtype(name: str, meta: torch.Tensor, target: _Target) -> torch.dtype:
    if target.dtype is None or not meta.is_floating_point():
        return meta.dtype
    if target.keep_float32 is not None and target.keep_float32.search(name):
        return torch.float32
    return target.dtype


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _set(model: nn.Module, name: str, values: torch.Tensor) -> None:
    module, attribute = _owner(model, name)
    if attribute in module._parameters:
        module._parameters[attribute] = nn.Parameter(values, requires_grad=False)
    else:
        module._buffers[attribute] = values


def _share(model: nn.Module, name: str, owner: str) -> None:
    """Make ``name`` the very tensor ``owner`` is."""
    source, source_attribute = _owner(model, owner)
    module, attribute = _owner(model, name)
    own = module._parameters if attribute in module._parameters else module._buffers
    own[attribute] = getattr(source, source_attribute)


def _make_missing(model: nn.Module, missing: list[str], target: _Target) -> None:
    """Give tensors that checkpoints may leave out (tables of sines, zero biases) their class's values.

    Raises:
        CheckpointError: a weight that a checkpoint must have.
    """
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    state = _wanted(model)
    required = [
        name
        for name in missing
        if not any(re.search(pattern, name) for pattern in patterns)
        and (state[name].is_meta or isinstance(state[name], nn.Parameter))
    ]
    if required:
        raise CheckpointError(
            f"the checkpoint lacks {len(required)} of the model's tensors: {_some(required)}; "
            "is it for another model class, or incomplete?"
        )
    empty = [name for name in missing if state[name].is_meta]
    for name in empty:
        _set(
            model,
            name,
            torch.zeros(state[name].shape, dtype=_dtype(name, state[name], target), device=target.device),
        )
    for path in dict.fromkeys(name.rpartition(".")[0] for name in empty):
        _initialise(model, path, set(empty))


@torch.no_grad()
def _initialise(model: nn.Module, path: str, empty: set[str]) -> None:
    """Let the model's class set the empty tensors of one module, and only those."""
    module = model.get_submodule(path)
    for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and f"{path}.{attribute}".lstrip(".") not in empty:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark
    initialise = getattr(model, "_init_weights", None)
    if initialise is not None:
        initialise(module)


def _noteworthy(model: nn.Module, unexpected: list[str]) -> list[str]:
    """Unexpected names less those transformers passes over, too: old buffers that are computed now."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    patterns += [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return [name for name in unexpected if not any(re.search(pattern, name) for pattern in patterns)]


def _some(names: list[str], count: int = 8) -> str:
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
