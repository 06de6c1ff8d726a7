"""What ``parallelize`` was asked for, read and checked: how many ranks, on which device, in which dtype, of
which model. Starts nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from shoal.comm.choose import Transport
from shoal.comm.torch_dist import torchrun_place
from shoal.device.base import Device, check_ranks, resolve_device
from shoal.errors import ConfigError, UnsupportedError, UsageError
from shoal.plan.quantised import refuse_quantised

__all__ = ["MARK", "Request", "check_model", "read_request"]

MARK = "_shoal_group"  # attribute of a parallel model


@dataclass(frozen=True, slots=True)
class Request:
    """A call of ``parallelize`` that can be carried out, as far as can be told beforehand."""

    tp: int
    device: Device  # rank 0's, or under torchrun this rank's
    dtype: torch.dtype | None
    place: tuple[int, int] | None  # (rank, ranks) under torchrun
    comm: Transport = "auto"  # between CPU ranks


def read_request(
    model: Any,
    tp: int | None,
    mp_size: int | None,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    comm: str = "auto",
) -> Request:
    """Fill in what was left open.

    Raises:
        UsageError: a value is wrong, or two contradict each other; ``field`` names it.
    """
    if tp is not None and mp_size is not None and tp != mp_size:
        raise UsageError(
            f"mp_size: {mp_size}, but tp says {tp}; they are one thing, pass one", field="mp_size"
        )
    tp = mp_size if tp is None else tp
    if tp is not None and (isinstance(tp, bool) or not isinstance(tp, int) or tp < 1):
        raise UsageError(f"tp: {tp!r} is not a number of ranks; pass at least 1", field="tp")
    if comm not in get_args(Transport):
        raise UsageError(f"comm: {comm!r} is none of {get_args(Transport)}", field="comm")
    place = torchrun_place()
    first = _device(model, tp, device)
    if place is not None:
        if tp not in (None, place[1]):
            raise UsageError(f"tp: {tp}, but torchrun has started {place[1]} ranks; leave tp out", field="tp")
        ranks = place[1]
        first = first.for_rank(int(os.environ.get("LOCAL_RANK", place[0])))
    else:
        ranks = tp if tp is not None else first.visible_count if first.kind == "cuda" else 1
        _check_ranks(first, ranks)
    return Request(ranks, first, _dtype(dtype), place, cast(Transport, comm))


def _device(model: Any, tp: int | None, device: str | torch.device | None) -> Device:
    """Where rank 0 computes: as asked, or where the model is; a path, or any model if tp was left open, takes
    CUDA where there is some."""
    if device is not None:
        return resolve_device(str(device))
    here = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    if here is not None and here.device.type != "cpu":
        return resolve_device(str(here.device))
    if here is not None and tp is not None:
        return resolve_device("cpu")
    found = resolve_device("auto")
    return found if found.kind == "cuda" or (tp == 1 and here is None) else resolve_device("cpu")


def _check_ranks(device: Device, ranks: int) -> None:
    if ranks > 1 and device.kind not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"tp: {ranks} ranks on {device.kind} are not supported; pass tp=1, or device='cpu'", field="tp"
        )
    try:
        check_ranks(device, ranks)
    except ConfigError as error:
        raise ConfigError(str(error).replace("tensor_parallel_size:", "tp:"), field="tp") from error


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is None or dtype == "auto":
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype: {dtype!r} is not a floating-point torch dtype or its name", field="dtype")
    return found


def check_model(model: Any) -> PreTrainedModel:
    """Refuse a model in memory that cannot be parallelized.

    Raises:
        UsageError: it is no transformers model, has no weights, or is parallel already.
        UnsupportedError: it is quantised or spread over devices.
    """
    if not isinstance(model, PreTrainedModel):
        hint = "; pass its model: pipe.model = shoal.parallelize(pipe.model)" if _has_model(model) else ""
        raise UsageError(
            f"model: a {type(model).__name__} is neither a transformers model nor a path or hub id{hint}",
            field="model",
        )
    if MARK in vars(model):
        raise UsageError("model: it is parallel already", field="model")
    refuse_quantised(model)
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UnsupportedError(
            "model: accelerate has spread it over devices (hf_device_map); load it without device_map",
            field="model",
        )
    empty = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if empty:
        raise UsageError(
            f"model: {empty[0]} is on meta, without values; pass the model's path, and each rank reads "
            "its part",
            field="model",
        )
    return model


def _has_model(value: Any) -> bool:
    return isinstance(getattr(value, "model", None), PreTrainedModel)
