"""Packed weights moved together, into huge pages: a step reads every weight once. Knows no layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shoal.cpu_kernels.layout import PackedWeight
from shoal.device.huge import HugeRegion, room

__all__ = ["settle"]

_MOVED = ("data", "scales", "table", "bias")


def settle(weights: Iterable[PackedWeight]) -> None:
    """Move these weights, one tensor at a time.

    Their descriptors keep their addresses, and say where the tensors are now.
    """
    weights = list(weights)
    total = sum(room(tensor.nbytes) for weight in weights for tensor in weight.tensors)
    if not total:
        return
    region = HugeRegion(total)
    for weight in weights:
        for name in _MOVED:
            tensor: torch.Tensor | None = getattr(weight, name)
            if tensor is not None:
                setattr(weight, name, region.take(tensor.shape, tensor.dtype).copy_(tensor))
        weight.describe()
