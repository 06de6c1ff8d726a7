"""Which dimensions of an activation run over a weight's features, and where in the parameter each feature
lies. Knows no operation and no ranks.

Features are numbered over all those dimensions together, in the activation's order, the last fastest: of
``[batch, tokens, heads, size]`` the feature of head h and position i is ``h * size + i``. What a rank
keeps of a parameter is an index set along *one* of its dimensions, so a set of features can be kept if it
is everything that lies at some indices of one dimension: :func:`find_slab`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Features", "Origin", "Slab", "find_slab", "last_dim", "places"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in a contiguous parameter of ``shape`` the elements of a tensor made of it lie.

    The element at an index is at ``offset + sum(index * strides)``; a stride of 0 means that the dimension
    goes over something else than the parameter.
    """

    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Features:
    """Feature dimensions of one activation.

    ``dims`` ascend, or are ``(-1,)``; ``sizes`` are their lengths. ``places`` has, for dimensions of the
    parameter (of ``shape``), the index along it at which each feature lies.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    places: Mapping[int, torch.Tensor]

    @property
    def count(self) -> int:
        """Number of features."""
        return math.prod(self.sizes)

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """The activation as ``[..., features]``."""
        if not self.dims:
            return tensor.unsqueeze(-1)
        if len(self.dims) == 1:
            return tensor.movedim(self.dims[0], -1)
        return tensor.movedim(self.dims, tuple(range(-len(self.dims), 0))).flatten(-len(self.dims))

    def cut(self, tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
        """The activation with only the kept features; None if they are no part along one dimension of it."""
        if len(self.dims) == 1:
            return tensor.index_select(self.dims[0], kept)
        mask = torch.zeros(self.count, dtype=torch.bool)
        mask[kept] = True
        grid = mask.view(self.sizes)
        for position, dim in enumerate(self.dims):
            lines = grid.movedim(position, 0).flatten(1)
            if torch.equal(lines.any(1), lines.all(1)):
                return tensor.index_select(dim, lines.any(1).nonzero().flatten())
        return None


def last_dim(count: int, shape: tuple[int, ...] = (), dim: int | None = None) -> Features:
    """Features along the activation's last dimension, in the order of the parameter's dimension ``dim``."""
    return Features((-1,), (count,), shape, {} if dim is None else {dim: torch.arange(count)})


def places(
    origin: Origin,
    sizes: Sequence[int],
    feature_dims: Sequence[int],
    wanted: Collection[int] | None = None,
) -> dict[int, torch.Tensor]:
    """For each dimension of the parameter along which a feature lies at one index, that index.

    Args:
        origin: of the tensor that is multiplied by.
        sizes: its shape.
        feature_dims: its dimensions that run over features, in the order in which features are numbered.
        wanted: dimensions of the parameter to ask about; None: all.
    """
    if wanted is not None and not wanted:
        return {}
    start = torch.full((), origin.offset, dtype=torch.long)
    for dim in feature_dims:
        start = start.unsqueeze(-1) + torch.arange(sizes[dim]) * origin.strides[dim]
    start = start.flatten()
    others = [
        (sizes[dim], origin.strides[dim])
        for dim in range(len(sizes))
        if dim not in feature_dims and sizes[dim] > 1 and origin.strides[dim]
    ]
    found: dict[int, torch.Tensor] = {}
    for dim, size in enumerate(origin.shape):
        if wanted is not None and dim not in wanted:
            continue
        stride = math.prod(origin.shape[dim + 1 :])
        reach = sum((length - 1) * step for length, step in others if step % (stride * size))
        if int((start % stride).max()) + reach < stride:
            found[dim] = start // stride % size
    return found


@dataclass(frozen=True, slots=True)
class Slab:
    """What each rank keeps of a parameter: indices along ``dim``, which is ``size`` long."""

    dim: int
    size: int
    parts: tuple[torch.Tensor, ...]  # one entry a rank, ascending


def find_slab(uses: Sequence[Features], parts: Sequence[torch.Tensor]) -> Slab | None:
    """The indices along one dimension of the parameter that hold the features a rank keeps, and no others.

    Args:
        uses: the features of every use of the parameter; all have the same number of them.
        parts: features kept, one entry a rank.

    Returns:
        None where no dimension separates what is kept from what is not.
    """
    for dim in sorted(set.intersection(*(set(use.places) for use in uses))):
        size = uses[0].shape[dim]
        distinct = {tuple(use.places[dim].tolist()): use.places[dim] for use in uses}
        kept = [_held(list(distinct.values()), part, size) for part in parts]
        if all(entry is not None for entry in kept):
            return Slab(dim, size, tuple(entry for entry in kept if entry is not None))
    return None


def _held(uses: Sequence[torch.Tensor], part: torch.Tensor, size: int) -> torch.Tensor | None:
    """The indices at which the kept features lie, of all uses; None if others lie there too.

    Uses may lie in different blocks of the dimension (an expert each): what no use was seen of is taken
    for further blocks of the same kind, if the blocks seen are of one kind and fill the dimension evenly.
    """
    is_kept = torch.zeros(len(uses[0]), dtype=torch.bool)
    is_kept[part] = True
    held, seen, dropped = (torch.zeros(size, dtype=torch.bool) for _ in range(3))
    for place in uses:
        held[place[is_kept]] = True
        dropped[place[~is_kept]] = True
        seen[place] = True
    if bool((held & dropped).any()):
        return None
    if not bool(seen.all()):
        length = int(seen.sum()) // len(uses)
        starts = [int(place.min()) for place in uses]
        is_regular = size % length == 0 and all(start % length == 0 for start in starts)
        if not is_regular or any(int(place.max()) - int(place.min()) + 1 != length for place in uses):
            return None
        block = held[starts[0] : starts[0] + length]
        if any(not torch.equal(held[start : start + length], block) for start in starts):
            return None
        held = block.repeat(size // length)
    return held.nonzero().flatten()
