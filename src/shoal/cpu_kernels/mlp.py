"""The two kinds of MLP: gated, activation(x G^T) * (x U^T), and plain, activation(x W^T + b); then down.

Knows no model. In a gated one the panels of gate and up alternate in one packed weight: a tile of sums holds
both, the activation and the product are its epilogue, and only the product is written.
"""

from __future__ import annotations

import torch

from shoal.cpu_kernels.activation import activate_panels, activation_number
from shoal.cpu_kernels.arguments import argument, rows_of, run_job
from shoal.cpu_kernels.emit import PANEL
from shoal.cpu_kernels.layout import PANELS, PackedWeight, interleave, pack
from shoal.cpu_kernels.linear import PackedLinear, finish_row
from shoal.cpu_kernels.memory import (
    copy_panel,
    load_float32,
    load_int64,
    multiply_panel,
    stack_floats,
    store_float32,
)
from shoal.cpu_kernels.microkernel import GROUP_PANELS
from shoal.cpu_kernels.product import BLOCK_FLOATS, BLOCK_ROWS, TILE_BYTES, even_block, multiply_group, share
from shoal.jit.compile import kernel
from shoal.jit.team import Team

__all__ = ["GatedMLP", "PlainMLP", "gated_job", "gated_part", "pack_gated"]

_PANEL_BYTES = 4 * PANEL


@kernel(fastmath=False)
def _gate_row(activation: int, sums: int, panels: int, columns: int, out: int) -> None:
    """out = activation(gate) * up over ``columns`` floats, from panels of gate and up in turn."""
    for pair in range(panels // 2):
        gate = sums + pair * 2 * _PANEL_BYTES
        activate_panels(activation, gate, 1)
        multiply_panel(gate, gate + _PANEL_BYTES)
        first = pair * PANEL
        if first + PANEL <= columns:
            copy_panel(out + pair * _PANEL_BYTES, gate)
        else:
            for j in range(columns - first):
                store_float32(out, first + j, load_float32(gate, j))


@kernel(fastmath=False)
def gated_part(
    index: int,
    count: int,
    weight: int,
    x: int,
    x_bytes: int,
    rows: int,
    activation: int,
    columns: int,
    out: int,
    out_bytes: int,
) -> None:
    """out = activation(x G^T + bg) * (x U^T + bu), the part of participant ``index`` of ``count``.

    Args:
        weight: address of the descriptor of gate and up packed by :func:`pack_gated`.
        x: address of the first of ``rows`` rows, [K] float32, ``x_bytes`` from one to the next.
        activation: a number of :data:`shoal.cpu_kernels.activation.ACTIVATIONS`.
        columns: of gate, and of up.
        out: as ``x``, [columns].
    """
    first_row, last_row, first, last = share(index, count, rows, load_int64(weight, PANELS) // 2)
    sums = stack_floats(BLOCK_FLOATS)
    block = even_block(last_row - first_row, BLOCK_ROWS)
    for row in range(first_row, last_row, block):
        length = min(block, last_row - row)
        for panel in range(2 * first, 2 * last, GROUP_PANELS):
            width = min(GROUP_PANELS, 2 * last - panel)
            multiply_group(weight, panel, width, x + row * x_bytes, x_bytes, length, sums)
            column = panel // 2 * PANEL
            for r in range(length):
                line = sums + r * TILE_BYTES
                finish_row(weight, panel, width, line)
                _gate_row(activation, line, width, columns - column, out + (row + r) * out_bytes + 4 * column)


@kernel(fastmath=False)
def gated_job(index: int, count: int, words: int) -> int:
    """:func:`gated_part` as a job; its words: rows, weight, x, x_bytes, activation, columns,
    out, out_bytes."""
    gated_part(
        index,
        count,
        argument(words, 1),
        argument(words, 2),
        argument(words, 3),
        argument(words, 0),
        argument(words, 4),
        argument(words, 5),
        argument(words, 6),
        argument(words, 7),
    )
    return 0


def pack_gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    storage: str = "float32",
    group: int = 32,
) -> PackedWeight:
    """Gate and up [I, K] in one packed weight, panels in turn; see :func:`shoal.cpu_kernels.layout.pack`.

    Raises:
        ValueError: shapes that differ, one bias without the other, or what ``pack`` refuses.
    """
    if (gate_bias is None) != (up_bias is None):
        raise ValueError("gate and up: both with bias, or neither")
    bias = None
    if gate_bias is not None and up_bias is not None:
        bias = interleave(gate_bias, up_bias)
    return pack(interleave(gate, up), bias, storage, group)


class GatedMLP:
    """down(activation(gate(x)) * up(x)), computed by a team of threads.

    Args:
        gate_up: packed by :func:`pack_gated`.
        down: packed, [N, I].
        activation: a name of ``ACTIVATIONS``.

    Raises:
        ValueError: an unknown activation, or widths that do not fit.
    """

    def __init__(self, gate_up: PackedWeight, down: PackedWeight, team: Team, activation: str) -> None:
        if gate_up.panels != 2 * -(-down.depth // PANEL):
            raise ValueError(f"down takes {down.depth}, gate and up give {gate_up.panels} panels")
        self.gate_up = gate_up
        self.down = PackedLinear(down, team)
        self._team = team
        self._activation = activation_number(activation)

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The MLP of ``x`` [..., K] float32, plus ``residual``; see :class:`PackedLinear`."""
        rows = rows_of(x, self.gate_up.depth, "x")
        inner = self.down.weight.depth
        hidden = torch.empty(rows.shape[0], inner)
        run_job(
            self._team,
            gated_job,
            rows.shape[0],
            self.gate_up.address,
            rows.data_ptr(),
            4 * rows.stride(0),
            self._activation,
            inner,
            hidden.data_ptr(),
            4 * inner,
        )
        result = self.down(hidden, out, residual)
        return result if out is not None else result.view(*x.shape[:-1], self.down.weight.columns)


class PlainMLP:
    """down(activation(up(x))), computed by a team of threads.

    Args:
        up: packed, [I, K].
        down: packed, [N, I].
        activation: a name of ``ACTIVATIONS``.

    Raises:
        ValueError: an unknown activation, or widths that do not fit.
    """

    def __init__(self, up: PackedWeight, down: PackedWeight, team: Team, activation: str) -> None:
        if up.columns != down.depth:
            raise ValueError(f"down takes {down.depth}, up gives {up.columns}")
        self.up = PackedLinear(up, team, activation)
        self.down = PackedLinear(down, team)

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The MLP of ``x`` [..., K] float32, plus ``residual``; see :class:`PackedLinear`."""
        return self.down(self.up(x), out, residual)
