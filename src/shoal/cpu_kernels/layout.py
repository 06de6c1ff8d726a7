"""Weights as the kernels read them: panels of 16 columns, in four storages. Knows no product.

A linear layer's weight [N, K] becomes ``ceil(N / 16)`` panels; a panel is [K, 16], so that one step over K
reads 16 neighbouring numbers. N need not divide by 16: the last panel's missing columns are zero, and no
kernel shows them. A column here is an output of the layer.

Shape letters: N columns, K depth, P panels, G groups of K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from shoal.cpu_kernels.emit import PANEL
from shoal.cpu_kernels.microkernel import multiply_address
from shoal.cpu_kernels.weight_formats import BFLOAT16, FLOAT32, INT4, INT8

__all__ = [
    "GROUP_SIZES",
    "STORAGES",
    "PackedWeight",
    "interleave",
    "pack",
    "pad_columns",
    "unpack",
]

STORAGES: Mapping[str, int] = MappingProxyType(
    {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}
)
GROUP_SIZES = (32, 64)

# Words of a descriptor, int64.
MICROKERNEL, COLUMNS, DEPTH, PANELS, DATA, PANEL_BYTES, PAIR_BYTES = range(7)  # a pair: two neighbouring k
TABLE, TABLE_BYTES, GROUP, SCALES, BIAS, STORAGE = range(7, 13)

_LEVELS = 15  # steps from the lowest to the highest number of four bits
# How an int4 group's range is laid on the numbers, (part of the range, steps it takes): the smallest squared
# error wins. Fewer steps find the grid of weights that had four bits before, where not all were in use; a
# part of the range serves groups with outliers.
_TRIALS = ((1.0, 15), (1.0, 14), (1.0, 13), (0.88, 15))
_REFITS = 3  # times that the grid is then fitted to its own numbers, which takes the error down some more
_MOST_INT8 = 127
_PIECE_FLOATS = 256 * 1024


@dataclass(eq=False)
class PackedWeight:
    """A linear layer's weight and bias, packed."""

    storage: int
    columns: int  # N
    depth: int  # K
    data: torch.Tensor  # [P, K, 16] float32, bfloat16 or int8; int4: [P, ceil(K / 2), 16] uint8
    scales: torch.Tensor | None = None  # int8: [P * 16] float32, by column
    table: torch.Tensor | None = None  # int4: [P, G, 2, 16] bfloat16, scale and offset by group and column
    group: int = GROUP_SIZES[0]  # int4: k per group
    bias: torch.Tensor | None = None  # [P * 16] float32

    @property
    def panels(self) -> int:
        return self.data.shape[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is kept."""
        return [tensor for tensor in (self.data, self.scales, self.table, self.bias) if tensor is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def descriptor(self) -> NDArray[numpy.int64]:
        """What kernels are given: the words MICROKERNEL to STORAGE. Compiles the storage's microkernel."""
        return numpy.array(self._words(), numpy.int64)

    def describe(self) -> None:
        """Have the descriptor say where the tensors are now."""
        self.descriptor[:] = self._words()

    def _words(self) -> list[int]:
        table_bytes = 0 if self.table is None else self.table[0].nbytes
        return [
            multiply_address(self.storage),
            self.columns,
            self.depth,
            self.panels,
            self.data.data_ptr(),
            self.data[0].nbytes,
            PANEL if self.storage == INT4 else 2 * PANEL * self.data.element_size(),
            _address(self.table),
            table_bytes,
            self.group,
            _address(self.scales),
            _address(self.bias),
            self.storage,
        ]

    @cached_property
    def address(self) -> int:
        """The descriptor's address, good as long as this object lives."""
        return int(self.descriptor.ctypes.data)


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    storage: str = "float32",
    group: int = GROUP_SIZES[0],
    is_transposed: bool = False,
) -> PackedWeight:
    """Pack a linear layer.

    Args:
        weight: [N, K] of any floating dtype; or [K, N] with ``is_transposed`` (transformers' Conv1D).
        bias: [N], or None.
        storage: "float32"; "bfloat16", rounded to nearest; "int8", one scale per column; "int4", a scale and
            an offset (bfloat16) per column and group of K.
        group: int4: 32 or 64.

    Raises:
        ValueError: an unknown storage or group, a weight that is not a matrix or is empty, a bias that does
            not fit.
    """
    if storage not in STORAGES:
        raise ValueError(f"storage: one of {', '.join(STORAGES)}, got {storage!r}")
    if group not in GROUP_SIZES:
        raise ValueError(f"group: one of {GROUP_SIZES}, got {group}")
    if weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise ValueError(f"weight: a matrix of floats, got {weight.dtype} {list(weight.shape)}")
    matrix = weight.detach()
    matrix = matrix.T if is_transposed else matrix
    columns, depth = matrix.shape
    if bias is not None and bias.shape != (columns,):
        raise ValueError(f"bias: [{columns}], got {list(bias.shape)}")
    padded_bias = None if bias is None else pad_columns(bias.detach())
    panels = _panels(matrix)
    number = STORAGES[storage]
    if number == FLOAT32:
        return PackedWeight(number, columns, depth, panels.float().contiguous(), bias=padded_bias)
    if number == BFLOAT16:
        return PackedWeight(number, columns, depth, panels.bfloat16().contiguous(), bias=padded_bias)
    # In pieces: what quantising needs besides the result is then a small part of a weight.
    pieces = torch.split(panels, max(1, _PIECE_FLOATS // (PANEL * depth)))
    if number == INT8:
        data, scales = (torch.cat(parts) for parts in zip(*map(_to_int8, pieces), strict=True))
        return PackedWeight(number, columns, depth, data, scales=scales, bias=padded_bias)
    results = [_to_int4(piece, group) for piece in pieces]
    data, table = (torch.cat(parts) for parts in zip(*results, strict=True))
    return PackedWeight(number, columns, depth, data, table=table, group=group, bias=padded_bias)


def unpack(packed: PackedWeight) -> torch.Tensor:
    """The weight [N, K] in float32 that the kernels compute with."""
    if packed.storage == INT4:
        panels = _from_int4(packed)
    else:
        panels = packed.data.float()
        if packed.scales is not None:
            panels = panels * packed.scales.view(-1, 1, PANEL)
    return panels.transpose(1, 2).reshape(-1, packed.depth)[: packed.columns].contiguous()


def interleave(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Rows of two tensors in turn, 16 of each: the panels of a gated layer's gate and up projection.

    Args:
        first, second: [N, ...] of one shape (weights, or biases).

    Returns:
        [2 * P * 16, ...]; rows that fill the last panels are zero.

    Raises:
        ValueError: shapes that differ.
    """
    if first.shape != second.shape:
        raise ValueError(f"gate and up differ: {list(first.shape)} and {list(second.shape)}")
    pair = torch.stack([_padded(first), _padded(second)])  # [2, P * 16, ...]
    by_panel = pair.view(2, -1, PANEL, *first.shape[1:]).transpose(0, 1)  # [P, 2, 16, ...]
    return by_panel.flatten(0, 2).contiguous()


def pad_columns(bias: torch.Tensor) -> torch.Tensor:
    """[N] to [P * 16] in float32, zeros behind."""
    return _padded(bias.float()).contiguous()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[0] % PANEL
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _panels(matrix: torch.Tensor) -> torch.Tensor:
    """[N, K] to a view [P, K, 16]."""
    return _padded(matrix).reshape(-1, PANEL, matrix.shape[1]).transpose(1, 2)


def _to_int8(panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [P, K, 16] and scales [P * 16]."""
    panels = panels.float()
    scales = panels.abs().amax(1, keepdim=True) / _MOST_INT8  # [P, 1, 16]
    numbers = (panels / torch.where(scales > 0, scales, 1.0)).round_()
    return numbers.clamp_(-_MOST_INT8, _MOST_INT8).to(torch.int8).contiguous(), scales.flatten().contiguous()


def _to_int4(panels: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [P, ceil(K / 2), 16], two to a byte, and the table [P, G, 2, 16]."""
    panels = panels.float()
    depth = panels.shape[1]
    # What fills up the last group leaves its range as it is and counts for nothing.
    filler = panels[:, -1:].expand(-1, -depth % group, -1)
    grouped = torch.cat([panels, filler], 1).view(panels.shape[0], -1, group, PANEL)
    counts = torch.arange(grouped.shape[1] * group) < depth
    numbers, table = _quantise_groups(grouped, counts.view(-1, group, 1))
    flat = numbers.flatten(1, 2)[:, :depth]
    if depth % 2:
        flat = torch.cat([flat, torch.zeros_like(flat[:, :1])], 1)
    return (flat[:, 0::2] | (flat[:, 1::2] << 4)).contiguous(), table


def _quantise_groups(grouped: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers 0 to 15, uint8 in the shape of ``grouped`` [P, G, group, 16], and the table [P, G, 2, 16].

    ``counts`` [G, group, 1] says which values' errors count.
    """
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    best: _Int4 | None = None
    for part, steps in _TRIALS:
        scale, offset = (high - low) * (part / steps), low + (high - low) * ((1 - part) / 2)
        best = _better(best, _rounded_groups(grouped, counts, scale, offset))
    assert best is not None
    for _ in range(_REFITS):
        best = _better(best, _rounded_groups(grouped, counts, *_fitted(grouped, counts, best.numbers)))
    return best.numbers.to(torch.uint8), torch.cat([best.scale, best.offset], 2).bfloat16().contiguous()


class _Int4(NamedTuple):
    """Groups in four bits."""

    numbers: torch.Tensor  # [P, G, group, 16] float32, 0 to 15
    scale: torch.Tensor  # [P, G, 1, 16] float32 that bfloat16 can hold, as the offset
    offset: torch.Tensor
    error: torch.Tensor  # [P, G, 1, 16], squared


def _rounded_groups(
    grouped: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
) -> _Int4:
    """The numbers nearest to the weights on a grid. It is rounded first: the numbers then make up for what
    the table's bfloat16 loses."""
    scale, offset = scale.bfloat16().float(), offset.bfloat16().float()
    numbers = ((grouped - offset) / torch.where(scale != 0, scale, 1.0)).round_().clamp_(0, _LEVELS)
    error = (numbers * scale + offset - grouped).square_().mul_(counts).sum(2, keepdim=True)
    return _Int4(numbers, scale, offset, error)


def _better(one: _Int4 | None, other: _Int4) -> _Int4:
    """Of each group the one with the smaller error."""
    if one is None:
        return other
    is_worse = other.error >= one.error
    return _Int4(*(torch.where(is_worse, a, b) for a, b in zip(one, other, strict=True)))


def _fitted(
    grouped: torch.Tensor, counts: torch.Tensor, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and offset with which the numbers come nearest to the weights: a line through them."""
    total = counts.sum(1, keepdim=True)

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (x * counts).sum(2, keepdim=True) / total

    number, weight = mean(numbers), mean(grouped)
    spread = mean((numbers - number).square())
    scale = mean((numbers - number) * (grouped - weight)) / torch.where(spread > 0, spread, 1.0)
    return scale, weight - scale * number


def _from_int4(packed: PackedWeight) -> torch.Tensor:
    assert packed.table is not None
    numbers = torch.stack([packed.data & 15, packed.data >> 4], 2).flatten(1, 2)[:, : packed.depth]
    by_k = packed.table.float().repeat_interleave(packed.group, 1)[:, : packed.depth]  # [P, K, 2, 16]
    return numbers.float() * by_k[:, :, 0] + by_k[:, :, 1]
