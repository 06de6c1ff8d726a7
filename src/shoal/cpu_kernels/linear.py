"""Linear layers over packed weights: y = activation(x W^T + b) + residual. Knows no model.

Participants share the columns first: each reads its part of the weights once for up to BLOCK_ROWS rows.
Activations are float32 whatever the storage of the weights. A row's result depends on nothing but the row:
not on the others, not on the number of participants.
"""

from __future__ import annotations

import torch

from shoal.cpu_kernels.activation import activate_panels, activation_number
from shoal.cpu_kernels.arguments import argument, output, rows_of, run_job
from shoal.cpu_kernels.emit import PANEL
from shoal.cpu_kernels.layout import BIAS, COLUMNS, PANELS, SCALES, PackedWeight
from shoal.cpu_kernels.memory import (
    add_panel,
    add_panels,
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

__all__ = ["PackedLinear", "finish_row", "linear_job", "linear_part"]

_PANEL_BYTES = 4 * PANEL


@kernel(fastmath=False)
def finish_row(weight: int, first_panel: int, panels: int, sums: int) -> None:
    """Scales of an int8 weight and bias, on one row of sums of these panels."""
    scales, bias = load_int64(weight, SCALES), load_int64(weight, BIAS)
    for panel in range(panels):
        spot, offset = sums + panel * _PANEL_BYTES, (first_panel + panel) * _PANEL_BYTES
        if scales != 0:
            multiply_panel(spot, scales + offset)
        if bias != 0:
            add_panel(spot, bias + offset)


@kernel(fastmath=False)
def _store_row(sums: int, columns: int, residual: int, out: int) -> None:
    """out = sums + residual over ``columns`` floats; ``residual`` 0: no residual."""
    whole = columns // PANEL
    for panel in range(whole):
        offset = panel * _PANEL_BYTES
        if residual != 0:
            add_panels(out + offset, sums + offset, residual + offset)
        else:
            copy_panel(out + offset, sums + offset)
    for j in range(whole * PANEL, columns):
        value = load_float32(sums, j)
        if residual != 0:
            value += load_float32(residual, j)
        store_float32(out, j, value)


@kernel(fastmath=False)
def linear_part(
    index: int,
    count: int,
    weight: int,
    x: int,
    x_bytes: int,
    rows: int,
    activation: int,
    residual: int,
    residual_bytes: int,
    out: int,
    out_bytes: int,
) -> None:
    """out = activation(x W^T + b) + residual, the part of participant ``index`` of ``count``.

    Args:
        weight: address of a :class:`shoal.cpu_kernels.layout.PackedWeight`'s descriptor.
        x: address of the first of ``rows`` rows, [K] float32, ``x_bytes`` from one to the next.
        activation: a number of :data:`shoal.cpu_kernels.activation.ACTIVATIONS`.
        residual: likewise [N]; 0 for none; may be ``out``.
        out: likewise [N].
    """
    columns, panels = load_int64(weight, COLUMNS), load_int64(weight, PANELS)
    first_row, last_row, first, last = share(index, count, rows, panels)
    sums = stack_floats(BLOCK_FLOATS)
    block = even_block(last_row - first_row, BLOCK_ROWS)
    for row in range(first_row, last_row, block):
        length = min(block, last_row - row)
        for panel in range(first, last, GROUP_PANELS):
            width = min(GROUP_PANELS, last - panel)
            multiply_group(weight, panel, width, x + row * x_bytes, x_bytes, length, sums)
            shown = min(width * PANEL, columns - panel * PANEL)
            for r in range(length):
                line = sums + r * TILE_BYTES
                finish_row(weight, panel, width, line)
                activate_panels(activation, line, width)
                base = residual
                if residual != 0:
                    base = residual + (row + r) * residual_bytes + panel * _PANEL_BYTES
                _store_row(line, shown, base, out + (row + r) * out_bytes + panel * _PANEL_BYTES)


@kernel(fastmath=False)
def linear_job(index: int, count: int, words: int) -> int:
    """:func:`linear_part` as a job; its words: rows, weight, x, x_bytes, activation, residual,
    residual_bytes, out, out_bytes."""
    linear_part(
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
        argument(words, 8),
    )
    return 0


class PackedLinear:
    """A linear layer over a packed weight, computed by a team of threads.

    Args:
        weight: packed by :func:`shoal.cpu_kernels.layout.pack`.
        team: whose threads compute.
        activation: a name of ``ACTIVATIONS``, applied before the residual is added.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(self, weight: PackedWeight, team: Team, activation: str = "linear") -> None:
        self.weight = weight
        self._team = team
        self._activation = activation_number(activation)

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """activation(x W^T + b) + residual.

        Args:
            x: [..., K] float32.
            out: [M, N] float32 to write into, M being the rows of ``x``; may be ``residual``, not ``x``.
            residual: [..., N] float32.

        Returns:
            [..., N], or ``out`` as it was given.

        Raises:
            TypeError, ValueError: dtypes and shapes that do not fit.
        """
        weight = self.weight
        rows = rows_of(x, weight.depth, "x")
        count = rows.shape[0]
        target = output(out, count, weight.columns)
        base = None if residual is None else rows_of(residual, weight.columns, "residual")
        if base is not None and base.shape[0] != count:
            raise ValueError(f"residual: {count} rows, got {base.shape[0]}")
        if count:
            run_job(
                self._team,
                linear_job,
                count,
                weight.address,
                rows.data_ptr(),
                4 * rows.stride(0),
                self._activation,
                0 if base is None else base.data_ptr(),
                0 if base is None else 4 * base.stride(0),
                target.data_ptr(),
                4 * target.stride(0),
            )
        return target if out is not None else target.view(*x.shape[:-1], weight.columns)
