"""Packs what a recipe's steps read of a layer's modules, frees it there, and can put it back. Knows no
program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.cpu_kernels.emit import PANEL
from shoal.cpu_kernels.layout import PackedWeight, pack, unpack
from shoal.cpu_kernels.mlp import pack_gated
from shoal.fuse.recipe import Gate, Piece, Project

__all__ = ["Packer", "norm_tensors"]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed weight, and what its columns were."""

    pieces: tuple[Piece, ...]
    weight: PackedWeight
    is_gated: bool  # two pieces, 16 columns of each in turn

    def parts(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Each piece with its rows [N, K], as the kernels compute with them."""
        rows = unpack(self.weight)
        if self.is_gated:
            pairs = rows.view(-1, 2, PANEL, rows.shape[1])
            halves = (pairs[:, half].reshape(-1, rows.shape[1]) for half in range(2))
            yield from (
                (piece, half[: len(piece.rows)]) for piece, half in zip(self.pieces, halves, strict=True)
            )
            return
        start = 0
        for piece in self.pieces:
            yield piece, rows[start : start + len(piece.rows)]
            start += len(piece.rows)


@dataclass(slots=True)
class Packer:
    """Packs the linears of one layer.

    Args:
        layer: whose modules the pieces name.
        storage: a name of :data:`shoal.cpu_kernels.layout.STORAGES`.
        has_bias_of_sums: whether this rank adds the bias of what is summed over ranks; one does.
    """

    layer: nn.Module
    storage: str
    has_bias_of_sums: bool = True
    _packed: list[_Packed] = field(default_factory=list)
    _freed: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

    @property
    def weights(self) -> list[PackedWeight]:
        """All that was packed."""
        return [packed.weight for packed in self._packed]

    @property
    def num_bytes(self) -> int:
        """Bytes of all that was packed."""
        return sum(weight.num_bytes for weight in self.weights)

    def project(self, step: Project) -> PackedWeight:
        """The pieces of a projection one after the other, with their biases."""
        weight = torch.cat([self._weight(piece) for piece in step.pieces])
        bias = None
        if self._has_bias(step.pieces) and (self.has_bias_of_sums or not step.is_summed):
            bias = torch.cat([self._bias(piece) for piece in step.pieces])
        packed = pack(weight, bias, self.storage)
        self._packed.append(_Packed(step.pieces, packed, False))
        return packed

    def gate(self, step: Gate) -> PackedWeight:
        """Gate and up in turn."""
        pieces = step.gate, step.up
        gate, up = (self._weight(piece) for piece in pieces)
        gate_bias, up_bias = (self._bias(piece) if self._has_bias(pieces) else None for piece in pieces)
        packed = pack_gated(gate, up, gate_bias, up_bias, self.storage)
        self._packed.append(_Packed(pieces, packed, True))
        return packed

    def free(self) -> None:
        """Let the layer's own copies of the packed weights go."""
        for packed in self._packed:
            for piece in packed.pieces:
                module = self._module(piece)
                weight = module.get_parameter("weight")
                if piece.module not in self._freed:
                    self._freed[piece.module] = weight.shape, weight.dtype
                    weight.data = weight.new_empty(0)

    def restore(self) -> None:
        """Give the layer its weights back, as they were but for what the storage rounded.

        Rows that no step read are zero.
        """
        for name, (shape, dtype) in self._freed.items():
            self.layer.get_submodule(name).get_parameter("weight").data = torch.zeros(shape, dtype=dtype)
        for packed in self._packed:
            for piece, rows in packed.parts():
                module = self._module(piece)
                weight = module.get_parameter("weight").data
                target = weight.T if isinstance(module, Conv1D) else weight
                target[piece.rows] = (rows / piece.factors[:, None]).to(weight.dtype)
        self._freed.clear()

    def _module(self, piece: Piece) -> nn.Module:
        return self.layer.get_submodule(piece.module)

    def _weight(self, piece: Piece) -> torch.Tensor:
        """[N, K] float32, or as it is if nothing is to be changed."""
        module = self._module(piece)
        weight = module.get_parameter("weight").detach()
        rows = weight.T if isinstance(module, Conv1D) else weight
        if piece.is_whole and len(piece.rows) == len(rows):
            return rows
        chosen = rows[piece.rows]
        return chosen if bool((piece.factors == 1).all()) else chosen.float() * piece.factors[:, None]

    def _bias(self, piece: Piece) -> torch.Tensor:
        bias: torch.Tensor | None = getattr(self._module(piece), "bias", None)
        if bias is None:
            return torch.zeros(len(piece.rows))
        return bias.detach().float()[piece.rows] * piece.factors

    def _has_bias(self, pieces: Sequence[Piece]) -> bool:
        return any(getattr(self._module(piece), "bias", None) is not None for piece in pieces)


def norm_tensors(layer: nn.Module, module: str, adds_one: bool) -> Iterator[torch.Tensor | None]:
    """A norm's weight and bias, float32, None where it has none."""
    for name in ("weight", "bias"):
        tensor = getattr(layer.get_submodule(module), name, None)
        if tensor is None:
            yield None
        else:
            yield tensor.detach().float().contiguous() + (1.0 if adds_one and name == "weight" else 0.0)
