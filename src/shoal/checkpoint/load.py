"""Giving a model its weights: each tensor, or this rank's part of it, read, converted and set in place.

Knows no plan beyond the ranges it is handed. Tensors are set one at a time, straight into their final
memory, so the model is never held twice.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shoal.checkpoint.lazy import Computed, Lazy, Stored
from shoal.checkpoint.match import match
from shoal.checkpoint.missing import (
    initialise,
    noteworthy_missing,
    noteworthy_unexpected,
    refuse_missing,
    some,
)
from shoal.checkpoint.reader import CheckpointReader, Ranges, Slice, sliced_shape
from shoal.errors import CheckpointError

__all__ = ["LoadReport", "load_weights"]

_logger = logging.getLogger("shoal.checkpoint")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was read."""

    bytes_read: int  # of tensor data, from checkpoint files
    checkpoint_bytes: int  # of the checkpoint's files
    missing: tuple[str, ...]  # model tensors that the checkpoint lacks, as from_pretrained counts them
    unexpected: tuple[str, ...]  # checkpoint tensors that the model lacks, as from_pretrained counts them
    converted_whole: tuple[str, ...]  # tensors of which a part is kept, but that had to be read whole


@dataclass(frozen=True, slots=True)
class _Target:
    """What every tensor is loaded with."""

    slices: Mapping[str, Slice]
    zeros: Collection[str]
    device: torch.device
    dtype: torch.dtype | None
    usual_dtype: torch.dtype | None  # of the model's tensors, but for those made with one of their own
    keep_float32: re.Pattern[str] | None


def load_weights(
    model: nn.Module,
    reader: CheckpointReader,
    slices: Mapping[str, Slice] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
    zeros: Collection[str] = (),
    allow_missing: bool = False,
) -> LoadReport:
    """Fill a model whose parameters are on meta, and already of this rank's shapes.

    Args:
        model: a transformers model; its tensors' names are the unsharded model's.
        reader: the checkpoint.
        slices: by model name (each name of a tied tensor), the ranges this rank keeps; others are whole.
        device: where the weights go.
        dtype: of floating-point tensors, but for those the model's class keeps in float32 or makes in a
            dtype of their own; None: each tensor's dtype in ``model``.
        progress: called with tensors done and tensors in all.
        zeros: names of tensors that are zero on this rank, whatever the checkpoint says: not read.
        allow_missing: give weights that the checkpoint lacks random values, the same on every rank, with
            a warning, as ``from_pretrained`` does (a new head on an old body).

    Returns:
        bytes read and the names that did not match, as ``from_pretrained`` counts them.

    Raises:
        CheckpointError: a weight is missing, a shape does not fit, or a file is damaged.
    """
    wanted = _wanted(model)
    shapes = _whole_shapes(wanted, slices or {})
    matches = match(model, reader, wanted, shapes)
    target = _Target(
        slices=slices or {},
        zeros=frozenset(zeros),
        device=torch.device(device),
        dtype=dtype,
        usual_dtype=_usual_dtype(wanted.values()),
        keep_float32=_float32_names(model, dtype),
    )
    bytes_before = reader.bytes_read
    missing: list[str] = []
    groups = _tied_groups(model, wanted)
    for done, group in enumerate(groups):
        missing += _load_group(model, group, wanted, matches.sources, target)
        if progress is not None:
            progress(done + 1, len(groups))
    _make_missing(model, missing, shapes, target, allow_missing)
    left = [name for name, tensor in _all_tensors(model) if tensor.is_meta]
    assert not left, f"still without values after loading: {left}"
    report = LoadReport(
        bytes_read=reader.bytes_read - bytes_before,
        checkpoint_bytes=reader.total_bytes,
        missing=tuple(noteworthy_missing(model, missing)),
        unexpected=tuple(noteworthy_unexpected(model, matches.unexpected)),
        converted_whole=tuple(
            name for name in target.slices if isinstance(matches.sources.get(name), Computed)
        ),
    )
    _log(report)
    return report


def _log(report: LoadReport) -> None:
    _logger.info(
        "read %.1f MB of the checkpoint's %.1f MB", report.bytes_read / 1e6, report.checkpoint_bytes / 1e6
    )
    if report.unexpected:
        _logger.info(
            "the checkpoint has %d tensors the model does not use: %s",
            len(report.unexpected),
            some(report.unexpected),
        )
    if report.converted_whole:
        _logger.info(
            "%d tensors are stored in a form that must be read whole to keep a part: %s",
            len(report.converted_whole),
            some(report.converted_whole),
        )


def _whole_shapes(
    wanted: Mapping[str, torch.Tensor], slices: Mapping[str, Slice]
) -> dict[str, tuple[int, ...]]:
    """The shapes that tensors of which a part is kept have in the whole model, where the slice says."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in slices.items():
        size = getattr(part, "size", None)
        if name in wanted and size is not None:
            shape = list(wanted[name].shape)
            shape[part.dim] = size
            shapes[name] = tuple(shape)
    return shapes


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


def _usual_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The dtype that most floating-point tensors have."""
    counts = Counter(tensor.dtype for tensor in tensors if tensor.is_floating_point())
    return counts.most_common(1)[0][0] if counts else None


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
    if any(name in target.zeros for name in group):
        _load_zeros(model, group, wanted, target)
        return []
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
        is_stored = name in sources and not _are_one(sources[name], sources[owner])
        if is_stored or not same_part or wanted[name].shape != wanted[owner].shape:
            own = _read(name, sources.get(name, sources[owner]), wanted[name], target)
            if not same_part or not torch.equal(own, first):
                if same_part:
                    _untie(model, name, owner)
                _set(model, name, own)
                continue
        _share(model, name, owner)
    return []


def _are_one(first: Lazy, second: Lazy) -> bool:
    """Whether two names' values are the same bytes of one file, so that reading both would tell nothing."""
    return (
        isinstance(first, Stored)
        and isinstance(second, Stored)
        and first.reader is second.reader
        and first.reader.are_one(first.name, second.name)
    )


def _load_zeros(
    model: nn.Module, group: list[str], wanted: Mapping[str, torch.Tensor], target: _Target
) -> None:
    """Set a tensor to zero under all its names."""
    owner, *others = group
    shape, dtype = wanted[owner].shape, _dtype(owner, wanted[owner], target)
    _set(model, owner, torch.zeros(shape, dtype=dtype, device=target.device))
    for name in others:
        _share(model, name, owner)


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
    if target.dtype is None or not meta.is_floating_point() or meta.dtype != target.usual_dtype:
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


def _make_missing(
    model: nn.Module,
    missing: list[str],
    shapes: Mapping[str, tuple[int, ...]],
    target: _Target,
    allow_missing: bool,
) -> None:
    """Give tensors that checkpoints may leave out (tables of sines, zero biases) their class's values.

    Raises:
        CheckpointError: a weight that a checkpoint must have, unless that is allowed.
    """
    state = _wanted(model)
    required = [
        name
        for name in noteworthy_missing(model, missing)
        if state[name].is_meta or isinstance(state[name], nn.Parameter)
    ]
    if not allow_missing:
        refuse_missing(required)
    elif required:
        _logger.warning(
            "the checkpoint lacks %d of the model's tensors, they get random values: %s",
            len(required),
            some(required),
        )

    def put(name: str, values: torch.Tensor) -> None:
        _set(model, name, values.to(target.device, _dtype(name, state[name], target)))

    owners = {group[0]: group[1:] for group in _tied_groups(model, state) if group[0] in missing}
    initialise(model, [name for name in owners if state[name].is_meta], shapes, target.slices, put)
    for owner, others in owners.items():
        for name in others:
            if state[name].is_meta:
                _share(model, name, owner)
