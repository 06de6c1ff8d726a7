"""A model in memory sent to another rank: the module without its tensors, then the rank's slice of each, one
at a time, so that never two copies of the model exist. Knows no process.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.parallel.packing import Pickler, Unpickler, tensor_view
from shoal.plan.cutting import cut_ranges
from shoal.plan.slices import direct_tensors, slices, zero_names
from shoal.plan.types import Plan
from shoal.process.frames import Frames

__all__ = ["Parcel", "cast_and_move", "fill", "pack_skeleton", "parcels", "send_slices", "unpack_skeleton"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """One tensor of the model, under all its names, and the dtype it is to have."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    dtype: torch.dtype


def parcels(model: nn.Module, dtype: torch.dtype | None) -> list[Parcel]:
    """The model's parameters and buffers, tied ones once.

    Args:
        dtype: of floating-point parameters and persistent buffers, as ``from_pretrained`` has it: modules
            that the model's class keeps in float32, and computed buffers, stay as they are. None: unchanged.
    """
    keep = _float32_names(model, dtype)
    groups: dict[int, tuple[torch.Tensor, list[str]]] = {}
    computed = set()
    for name, module, attribute in direct_tensors(model):
        tensor = getattr(module, attribute)
        groups.setdefault(id(tensor), (tensor, []))[1].append(name)
        if attribute in module._non_persistent_buffers_set:
            computed.add(id(tensor))
    found = []
    for key, (tensor, names) in groups.items():
        is_cast = dtype is not None and tensor.is_floating_point() and key not in computed
        if is_cast and keep is not None and any(keep.search(name) for name in names):
            is_cast = False
        found.append(Parcel(tuple(names), tensor, dtype if is_cast and dtype else tensor.dtype))
    return found


def _float32_names(model: nn.Module, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """The parameters a model's class keeps in float32 (transformers' ``_keep_in_fp32_modules``)."""
    keep: set[str] = set()
    if dtype is torch.float16:
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        keep |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return re.compile("|".join(name.replace("*", ".*") for name in sorted(keep))) if keep else None


class _SkeletonPickler(Pickler):
    """Leaves the model's own tensors out, but for what they look like."""

    def __init__(self, file: io.BytesIO, device: torch.device, own: Mapping[int, int]) -> None:
        super().__init__(file, device, None, {})
        self._own = own

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in self._own:
            is_parameter = isinstance(value, nn.Parameter)
            return ("meta", self._own[id(value)], value.dtype, tuple(value.shape), is_parameter)
        return super().persistent_id(value)


class _SkeletonUnpickler(Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, device, {}, {})
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, name: Any) -> Any:
        if name[0] != "meta":
            return super().persistent_load(name)
        _, index, dtype, shape, is_parameter = name
        if index not in self._made:
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self._made[index] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
        return self._made[index]


def pack_skeleton(model: nn.Module, contents: Iterable[Parcel], device: torch.device) -> bytes:
    """The model without its tensors.

    Raises:
        Exception: something in it cannot be pickled.
    """
    file = io.BytesIO()
    own = {id(parcel.tensor): index for index, parcel in enumerate(contents)}
    taken = _take_capture_hooks(model)
    try:
        _SkeletonPickler(file, device, own).dump(model)
    finally:
        for attributes, name, value in reversed(taken):
            attributes[name] = value
    return file.getvalue()


def _take_capture_hooks(model: nn.Module) -> list[tuple[dict[Any, Any], Any, Any]]:
    """Take off the hooks by which transformers collects hidden states: each process installs its own when it
    needs them, and they hold what cannot be pickled. What was taken, to be put back.
    """
    taken: list[tuple[dict[Any, Any], Any, Any]] = []
    for module in model.modules():
        hooks = module._forward_hooks
        for key, hook in list(hooks.items()):
            if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                taken.append((hooks, key, hooks.pop(key)))
        if "_output_capturing_hooks_installed" in vars(module):
            name = "_output_capturing_hooks_installed"
            taken.append((vars(module), name, vars(module).pop(name)))
    return taken


def unpack_skeleton(data: bytes | bytearray, device: torch.device) -> nn.Module:
    """The model with its tensors on meta, in eval mode."""
    model: nn.Module = _SkeletonUnpickler(io.BytesIO(data), device).load()
    keys = [key for m in model.modules() for key in (*m._forward_hooks, *m._forward_pre_hooks)]
    # Keys count up from 0 in each process: hooks added here must not replace those that came along.
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(key + 1 for key in keys)])
    return model.eval()


def send_slices(frames: Frames, model: nn.Module, contents: Iterable[Parcel], plan: Plan, rank: int) -> None:
    """Send ``rank`` its slice of every tensor, in the parcels' order. The model is still whole."""
    kept, zeros = slices(plan, model, rank), zero_names(plan, model, rank)
    for parcel in contents:
        name = parcel.names[0]
        if name in zeros:
            continue
        part = parcel.tensor.detach()
        if name in kept:
            part = cut_ranges(part, kept[name].dim, kept[name].ranges)
        frames.send_bytes(tensor_view(part.to("cpu", parcel.dtype)))


def fill(
    frames: Frames,
    model: nn.Module,
    places: Iterable[tuple[tuple[str, ...], torch.dtype]],
    zeros: frozenset[str],
    device: torch.device,
) -> None:
    """Receive what :func:`send_slices` sends into a model that was sharded on meta.

    Args:
        places: names and dtype of each tensor, in the sender's order.
        zeros: names that are zero on this rank.
    """
    for names, dtype in places:
        shape = _get(model, names[0]).shape
        if names[0] in zeros:
            values = torch.zeros(shape, dtype=dtype)
        else:
            values = torch.empty(shape, dtype=dtype)
            frames.receive_into(tensor_view(values))
        _set(model, names, values.to(device))


def cast_and_move(
    model: nn.Module, places: Iterable[tuple[tuple[str, ...], torch.dtype]], device: torch.device
) -> None:
    """Bring a model's tensors, each under all its names, to their dtypes and a device, one at a time."""
    for names, dtype in places:
        tensor = _get(model, names[0])
        if tensor.dtype != dtype or tensor.device != device:
            _set(model, names, tensor.detach().to(device, dtype))


def _owners(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[dict[str, Any], str]]:
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        yield (module._parameters if attribute in module._parameters else module._buffers), attribute


def _get(model: nn.Module, name: str) -> torch.Tensor:
    ((tensors, attribute),) = _owners(model, [name])
    tensor: torch.Tensor = tensors[attribute]
    return tensor


def _set(model: nn.Module, names: Iterable[str], values: torch.Tensor) -> None:
    """Make ``values`` the one tensor under all ``names``."""
    parameter: nn.Parameter | None = None
    for tensors, attribute in _owners(model, names):
        if isinstance(tensors[attribute], nn.Parameter):
            parameter = parameter if parameter is not None else nn.Parameter(values, requires_grad=False)
            tensors[attribute] = parameter
        else:
            tensors[attribute] = values
