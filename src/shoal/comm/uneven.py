"""Uneven shards gathered by transports that gather equal pieces only: padded to the largest. Knows no
transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.errors import RankError

__all__ = ["gather_uneven"]


def gather_uneven(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int,
    rank: int,
    gather: Callable[[list[torch.Tensor], torch.Tensor], object],
) -> torch.Tensor:
    """The ranks' tensors concatenated along ``dim``.

    Args:
        tensor: this rank's, ``sizes[rank]`` long along ``dim``.
        gather: fills its first argument, one tensor a rank, with the ranks' second arguments.

    Raises:
        RankError: this rank's tensor has another length than promised; nothing was exchanged.
    """
    if tensor.shape[dim] != sizes[rank]:
        raise RankError(
            f"all_gather: rank {rank} brings {tensor.shape[dim]} along dimension {dim}, "
            f"promised were {list(sizes)}",
            rank,
        )
    moved = tensor.movedim(dim, 0)
    mine = moved.new_zeros(max(sizes), *moved.shape[1:])
    mine[: moved.shape[0]] = moved
    pieces = [torch.empty_like(mine) for _ in sizes]
    gather(pieces, mine)
    shards = [piece[:size].movedim(0, dim) for piece, size in zip(pieces, sizes, strict=True)]
    return torch.cat(shards, dim)
