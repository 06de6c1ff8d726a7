"""Tensors described, not read: a stored one, or several joined, stacked, cut or turned. Knows no model.

Where a checkpoint stores a parameter in pieces (a file tensor per expert, gate and up apart), a rank
that keeps ranges of the parameter reads just those ranges of just those pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.checkpoint.reader import CheckpointReader, Ranges, sliced_shape
from shoal.errors import CheckpointError

__all__ = ["Computed", "Cut", "Joined", "Lazy", "Permuted", "Stacked", "Stored", "Turned"]

_PIECE_BYTES = 32 * 2**20  # of a tensor that is put in order in memory of its own


class Lazy(Protocol):
    """A tensor that can be read in part."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """What it is stored in."""
        ...

    def read_into(self, ranges: Ranges, out: torch.Tensor) -> None:
        """Copy ranges into ``out``, whose shape is theirs; converts dtype and moves device."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor as it is in the checkpoint."""

    reader: CheckpointReader
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reader.shape(self.name)

    @property
    def dtype(self) -> torch.dtype:
        return self.reader.dtype(self.name)

    def read_into(self, ranges: Ranges, out: torch.Tensor) -> None:
        self.reader.read_into(self.name, ranges, out)


@dataclass(frozen=True)
class Joined:
    """Tensors put end to end along a dimension."""

    parts: Sequence[Lazy]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [list(part.shape) for part in self.parts]
        size = sum(shape[self.dim] for shape in shapes)
        for shape in shapes:
            shape[self.dim] = size
        return _common(shapes)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read_into(self, ranges: Ranges, out: torch.Tensor) -> None:
        others = {dim: kept for dim, kept in ranges.items() if dim != self.dim}
        sizes = [part.shape[self.dim] for part in self.parts]
        begins = list(itertools.accumulate(sizes, initial=0))
        offset = 0
        for start, stop in ranges.get(self.dim, ((0, begins[-1]),)):
            for part, begin, size in zip(self.parts, begins, sizes, strict=False):
                low, high = max(start, begin), min(stop, begin + size)
                if low < high:
                    window = out.narrow(self.dim, offset, high - low)
                    part.read_into({**others, self.dim: ((low - begin, high - begin),)}, window)
                    offset += high - low


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape along a new dimension."""

    parts: Sequence[Lazy]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = _common([list(part.shape) for part in self.parts])
        return (*shape[: self.dim], len(self.parts), *shape[self.dim :])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read_into(self, ranges: Ranges, out: torch.Tensor) -> None:
        inner = {dim - (dim > self.dim): kept for dim, kept in ranges.items() if dim != self.dim}
        chosen = itertools.chain(
            *(range(start, stop) for start, stop in ranges.get(self.dim, ((0, len(self.parts)),)))
        )
        for position, part in enumerate(chosen):
            self.parts[part].read_into(inner, out.select(self.dim, position))


@dataclass(frozen=True)
class Cut:
    """One range of another tensor along a dimension."""

    source: Lazy
    dim: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return sliced_shape(self.source.shape, {self.dim: ((self.start, self.stop),)})

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read_into(self, ranges: Ranges, out: torch.Tensor) -> None:
        kept = ranges.get(self.dim, ((0, self.stop - self.start),))
        moved = tuple((start + self.start, stop + self.start) for start, stop in kept)
        self.source.read_into({**ranges, self.dim: moved}, out)


@dataclass(frozen=True)
class Turned:
    """Another tensor with two dimensions exchanged."""

    source: Lazy
    first: int
    second: int

    def _exchange(self, dim: int) -> int:
        return {self.first: self.second, self.second: self.first}.get(dim, dim)

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.source.shape
        return tuple(whole[self._exchange(dim)] for dim in range(len(whole)))

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read_into(self, ranges: Ranges, out: torch.Tensor) -> None:
        turned = {self._exchange(dim): kept for dim, kept in ranges.items()}
        self.source.read_into(turned, out.transpose(self.first, self.second))


@dataclass(frozen=True)
class Permuted:
    """Another tensor with the indices along a dimension in another order: new index i is old ``order[i]``."""

    source: Lazy
    dim: int
    order: torch.Tensor  # int64, one-dimensional

    @property
    def shape(self) -> tuple[int, ...]:
        whole = list(self.source.shape)
        whole[self.dim] = len(self.order)
        return tuple(whole)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read_into(self, ranges: Ranges, out: torch.Tensor) -> None:
        """Reads the wanted indices in the order they are stored in, a few megabytes at a time."""
        kept = ranges.get(self.dim, ((0, len(self.order)),))
        chosen = [self.order[:0], *(self.order[start:stop] for start, stop in kept)]
        wanted, places = torch.cat(chosen).sort(stable=True)
        each = max(1, _PIECE_BYTES // max(1, out.nbytes // max(1, len(wanted))))
        for begin in range(0, len(wanted), each):
            stored, back = torch.unique_consecutive(wanted[begin : begin + each], return_inverse=True)
            shape = [*out.shape[: self.dim], len(stored), *out.shape[self.dim + 1 :]]
            values = torch.empty(shape, dtype=out.dtype)
            self.source.read_into({**ranges, self.dim: _runs(stored)}, values)
            here = places[begin : begin + each].to(out.device)
            out.index_copy_(self.dim, here, values.index_select(self.dim, back).to(out.device))


@dataclass(frozen=True)
class Computed:
    """A tensor that must be computed whole before a part of it can be taken.

    ``compute`` is asked once for the shape and once for the values; whoever gives it may keep the tensor
    in between.
    """

    compute: Callable[[bool], torch.Tensor]  # told whether this is the last time it is asked

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.compute(False).shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.compute(False).dtype

    def read_into(self, ranges: Ranges, out: torch.Tensor) -> None:
        values = self.compute(True)
        for dim, kept in ranges.items():
            rows = [row for start, stop in kept for row in range(start, stop)]
            values = values.index_select(dim, torch.tensor(rows, dtype=torch.int64))
        out.copy_(values)


def _runs(indices: torch.Tensor) -> list[tuple[int, int]]:
    """Ascending indices as half-open ranges."""
    if not len(indices):
        return []
    breaks = (torch.nonzero(indices[1:] - indices[:-1] != 1).flatten() + 1).tolist()
    bounds = [0, *breaks, len(indices)]
    numbers = indices.tolist()
    return [(numbers[a], numbers[b - 1] + 1) for a, b in itertools.pairwise(bounds)]


def _common(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The one shape of pieces that must agree.

    Raises:
        CheckpointError: they do not; a piece is missing, or of another model.
    """
    distinct = sorted({tuple(shape) for shape in shapes})
    if len(distinct) > 1:
        raise CheckpointError(f"the checkpoint's pieces of one tensor do not fit together: shapes {distinct}")
    return distinct[0]
