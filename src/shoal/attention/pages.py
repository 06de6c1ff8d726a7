"""KV pages as tensors: made, written, gathered. Knows nothing of requests; blocks are just numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.attention.base import KVShape, LayerPages
from shoal.device.backing import Backing
from shoal.device.huge import HugeRegion, room

__all__ = ["allocate", "gather", "write"]

_FIRST_BYTES = 128 << 20  # that are there at once, of all layers


def allocate(
    shapes: Sequence[KVShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_window_blocks: int = 0,
    later: Backing | None = None,
) -> list[LayerPages]:
    """Pages for every layer, zero; of layers that see a window ``num_window_blocks``, or 0: as many as of
    others.

    They are written once here: memory that is only reserved would cost a page fault at its first use,
    in the middle of somebody's request.

    Args:
        later: takes what is beyond the first blocks, and is to be started; None: nothing is put off.
    """
    counts = [num_window_blocks if shape.window and num_window_blocks else num_blocks for shape in shapes]
    sizes = [
        [(count, block_size, shape.heads, width) for width in (shape.key_width, shape.value_width)]
        for shape, count in zip(shapes, counts, strict=True)
    ]
    total = sum(room(math.prod(size) * dtype.itemsize) for pair in sizes for size in pair)
    region = HugeRegion(total) if device.type == "cpu" and total else None

    def make(size: tuple[int, ...]) -> torch.Tensor:
        tensor = region.take(size, dtype) if region else torch.empty(size, dtype=dtype, device=device)
        first = len(tensor)
        if region and later is not None:
            first = min(first, math.ceil(first * _FIRST_BYTES / total))
            later.add(tensor[first:])
        tensor[:first].zero_()
        return tensor

    return [LayerPages(make(keys), make(values)) for keys, values in sizes]


def write(pages: LayerPages, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Put keys [T, H, Ek] and values [T, H, Ev] into ``slots`` [T]."""
    pages.keys.flatten(0, 1).index_copy_(0, slots, keys)
    pages.values.flatten(0, 1).index_copy_(0, slots, values)


def gather(pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks of a pool [N, S, H, E] in order.

    Args:
        blocks: int64 [..., blocks].

    Returns:
        [..., H, blocks * S, E], a view of a fresh contiguous [..., blocks * S, H, E].
    """
    picked = pool[blocks]
    return picked.flatten(-4, -3).transpose(-3, -2)
