"""Columns of a packed weight read back as rows: the embedding of a model whose head shares its weight.

Knows no model. The head's packed weight [N, K] is then the only copy. Rows of the embedding are columns of
panels, so reading one touches a cache line per k: some microseconds a token.
"""

from __future__ import annotations

import torch

from shoal.cpu_kernels import layout
from shoal.cpu_kernels.arguments import argument, argument_float, float_bits, output, run_job
from shoal.cpu_kernels.emit import PANEL
from shoal.cpu_kernels.layout import PackedWeight
from shoal.cpu_kernels.memory import load_bfloat16, load_float32, load_int64, load_uint8, store_float32
from shoal.cpu_kernels.weight_formats import BFLOAT16, FLOAT32, INT8
from shoal.jit.compile import kernel
from shoal.jit.team import Team

__all__ = ["embed", "embed_job", "embed_part"]


@kernel(fastmath=False)
def _int4_row(weight: int, panel: int, lane: int, scale: float, out: int) -> None:
    """One column of an int4 weight."""
    data = load_int64(weight, layout.DATA) + panel * load_int64(weight, layout.PANEL_BYTES)
    table = load_int64(weight, layout.TABLE) + panel * load_int64(weight, layout.TABLE_BYTES)
    group = load_int64(weight, layout.GROUP)
    for k in range(load_int64(weight, layout.DEPTH)):
        both = load_uint8(data, k // 2 * PANEL + lane)
        number = both >> 4 if k % 2 else both & 15
        place = k // group * 2 * PANEL + lane
        value = load_bfloat16(table, place) * number + load_bfloat16(table, place + PANEL)
        store_float32(out, k, value * scale)


@kernel(fastmath=False)
def _read_column(weight: int, column: int, scale: float, out: int) -> None:
    """One column, times ``scale``, to [K] float32 at ``out``."""
    panel, lane = column // PANEL, column % PANEL
    depth, storage = load_int64(weight, layout.DEPTH), load_int64(weight, layout.STORAGE)
    data = load_int64(weight, layout.DATA) + panel * load_int64(weight, layout.PANEL_BYTES)
    if storage == FLOAT32:
        for k in range(depth):
            store_float32(out, k, load_float32(data, k * PANEL + lane) * scale)
    elif storage == BFLOAT16:
        for k in range(depth):
            store_float32(out, k, load_bfloat16(data, k * PANEL + lane) * scale)
    elif storage == INT8:
        step = load_float32(load_int64(weight, layout.SCALES), column)
        for k in range(depth):
            number = load_uint8(data, k * PANEL + lane)
            signed = number - 256 if number > 127 else number
            store_float32(out, k, signed * step * scale)
    else:
        _int4_row(weight, panel, lane, scale, out)


@kernel(fastmath=False)
def embed_part(
    index: int, count: int, weight: int, ids: int, rows: int, scale: float, out: int, out_bytes: int
) -> None:
    """out[row] = scale * column ids[row] of the weight, the rows of participant ``index`` of ``count``.

    Args:
        weight: address of a :class:`shoal.cpu_kernels.layout.PackedWeight`'s descriptor.
        ids: address of [rows] int64. An id that is no column gives a row of zeros.
        out: address of the first row, [K] float32, ``out_bytes`` from one to the next.
    """
    columns, depth = load_int64(weight, layout.COLUMNS), load_int64(weight, layout.DEPTH)
    for row in range(rows * index // count, rows * (index + 1) // count):
        column, target = load_int64(ids, row), out + row * out_bytes
        if 0 <= column < columns:
            _read_column(weight, column, scale, target)
        else:
            for k in range(depth):
                store_float32(target, k, 0.0)


@kernel(fastmath=False)
def embed_job(index: int, count: int, words: int) -> int:
    """:func:`embed_part` as a job; its words: rows, weight, ids, scale (float), out, out_bytes."""
    embed_part(
        index,
        count,
        argument(words, 1),
        argument(words, 2),
        argument(words, 0),
        argument_float(words, 3),
        argument(words, 4),
        argument(words, 5),
    )
    return 0


def embed(
    ids: torch.Tensor,
    weight: PackedWeight,
    team: Team,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of the embedding that ``weight`` is, times ``scale``.

    Args:
        ids: [...] int64, contiguous. One that is no column gives zeros (another rank's part of a vocabulary).
        out: [M, K] float32 to write into, M being the number of ids.

    Returns:
        [..., K], or ``out`` as it was given.

    Raises:
        TypeError, ValueError: dtypes and shapes that do not fit.
    """
    if ids.dtype != torch.int64 or not ids.is_contiguous():
        raise TypeError(f"ids: contiguous int64, got {ids.dtype} with strides {ids.stride()}")
    target = output(out, ids.numel(), weight.depth)
    run_job(
        team,
        embed_job,
        ids.numel(),
        weight.address,
        ids.data_ptr(),
        float_bits(scale),
        target.data_ptr(),
        4 * target.stride(0),
    )
    return target if out is not None else target.view(*ids.shape, weight.depth)
