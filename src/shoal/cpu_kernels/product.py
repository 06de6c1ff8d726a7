"""Rows times a group of panels, cut to what the caches hold. Knows no threads and not what becomes of it."""

from __future__ import annotations

from shoal.cpu_kernels import layout
from shoal.cpu_kernels import microkernel as micro
from shoal.cpu_kernels.emit import PANEL
from shoal.cpu_kernels.memory import load_int64, stack_floats, store_float32, store_int64
from shoal.jit.compile import kernel

__all__ = ["BLOCK_FLOATS", "BLOCK_ROWS", "TILE_BYTES", "even_block", "multiply_group", "share"]

BLOCK_ROWS = 192  # rows whose sums are held at once: the weights are read once for all of them
_CALL_FLOATS = 2 * micro.CALL_WORDS  # the words of a call, in floats
_TILE_WIDTH = micro.GROUP_PANELS * PANEL
TILE_BYTES = 4 * _TILE_WIDTH  # of one row of sums
BLOCK_FLOATS = BLOCK_ROWS * _TILE_WIDTH

# k per pass where there are many rows: the panels' part then stays in the second level cache from one few
# rows to the next. A multiple of every int4 group.
_BLOCK_DEPTH = 512
_ENOUGH_UNITS = 8  # for each participant: one more or less is then an eighth


@kernel(fastmath=False)
def even_block(total: int, most: int) -> int:
    """The size of equal blocks, none larger than ``most``, that ``total`` is cut to (the last is smaller)."""
    blocks = max(1, (total + most - 1) // most)
    return max(1, (total + blocks - 1) // blocks)


@kernel(fastmath=False)
def share(index: int, count: int, rows: int, units: int) -> tuple[int, int, int, int]:
    """What participant ``index`` of ``count`` computes of ``rows`` rows and ``units`` panels.

    Columns are shared, so that each weight is read by one. Where that gives some participants much more than
    others and there are rows enough, the rows are shared too.

    Returns:
        (first row, behind the last row, first unit, behind the last unit); the parts cover everything once.
    """
    row_parts = 1
    while (
        count % (2 * row_parts) == 0
        and units * row_parts < _ENOUGH_UNITS * count
        and rows >= 2 * row_parts * 2 * micro.MAX_ROWS
    ):
        row_parts *= 2
    unit_parts = count // row_parts
    row_part, unit_part = index // unit_parts, index % unit_parts
    return (
        rows * row_part // row_parts,
        rows * (row_part + 1) // row_parts,
        units * unit_part // unit_parts,
        units * (unit_part + 1) // unit_parts,
    )


@kernel(fastmath=False)
def multiply_group(
    weight: int, first_panel: int, panels: int, x: int, x_bytes: int, rows: int, sums: int
) -> None:
    """sums = x @ panels, without an int8 weight's scales and without bias.

    Args:
        weight: address of a :class:`shoal.cpu_kernels.layout.PackedWeight`'s descriptor.
        panels: 1 to 4, from ``first_panel`` on.
        x: address of the first row, [depth] float32, ``x_bytes`` from one to the next.
        rows: 1 to BLOCK_ROWS.
        sums: address of [rows, 64] float32.
    """
    depth, group = load_int64(weight, layout.DEPTH), load_int64(weight, layout.GROUP)
    panel_bytes = load_int64(weight, layout.PANEL_BYTES)
    table_bytes = load_int64(weight, layout.TABLE_BYTES)
    start = load_int64(weight, layout.DATA) + first_panel * panel_bytes
    table = load_int64(weight, layout.TABLE) + first_panel * table_bytes
    microkernel = load_int64(weight, layout.MICROKERNEL)
    for j in range(rows * _TILE_WIDTH):
        store_float32(sums, j, 0.0)
    call = stack_floats(_CALL_FLOATS)
    store_int64(call, micro.PANELS, panels)
    store_int64(call, micro.PANEL_BYTES, panel_bytes)
    store_int64(call, micro.TABLE_BYTES, table_bytes)
    store_int64(call, micro.GROUP, group)
    store_int64(call, micro.X_BYTES, x_bytes)
    # A single turn fetches all of the next group; of several turns, each fetches two panels: it is spread.
    store_int64(call, micro.FURTHER, 2 * panel_bytes if rows <= micro.MAX_ROWS else 0)
    at_once = even_block(rows, micro.MAX_ROWS)
    block = depth if rows <= micro.MAX_ROWS else _BLOCK_DEPTH
    for k in range(0, depth, block):
        here = start + k // 2 * load_int64(weight, layout.PAIR_BYTES)
        store_int64(call, micro.WEIGHT, here)
        store_int64(call, micro.TABLE, table + k // group * 4 * PANEL)
        store_int64(call, micro.DEPTH, min(block, depth - k))
        for row in range(0, rows, at_once):
            coming = panels + min(2 * (row // at_once), panels - 1)
            store_int64(call, micro.PREFETCH, here + coming * panel_bytes)
            store_int64(call, micro.ROWS, min(at_once, rows - row))
            store_int64(call, micro.X, x + row * x_bytes + 4 * k)
            store_int64(call, micro.TILE, sums + row * TILE_BYTES)
            micro.multiply(microkernel, call)
