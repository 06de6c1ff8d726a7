"""Rows picked by number: those of a step whose logits are wanted. Knows not what they are."""

from __future__ import annotations

import torch

from shoal.cpu_kernels.arguments import argument, output, rows_of, run_job
from shoal.cpu_kernels.memory import load_float32, load_int64, store_float32
from shoal.jit.compile import kernel
from shoal.jit.team import Team

__all__ = ["pick_rows", "pick_rows_job", "pick_rows_part"]


@kernel(fastmath=False)
def pick_rows_part(
    index: int,
    count: int,
    x: int,
    x_bytes: int,
    width: int,
    numbers: int,
    rows: int,
    out: int,
    out_bytes: int,
) -> None:
    """out[row] = x[numbers[row]], the rows of participant ``index`` of ``count``.

    Args:
        x: address of the first row, [width] float32, ``x_bytes`` from one to the next.
        numbers: address of [rows] int64.
        out: as ``x``; another memory than ``x``.
    """
    for row in range(rows * index // count, rows * (index + 1) // count):
        source, target = x + load_int64(numbers, row) * x_bytes, out + row * out_bytes
        for i in range(width):
            store_float32(target, i, load_float32(source, i))


@kernel(fastmath=False)
def pick_rows_job(index: int, count: int, words: int) -> int:
    """:func:`pick_rows_part` as a job; its words: rows, x, x_bytes, width, numbers, out, out_bytes."""
    pick_rows_part(
        index,
        count,
        argument(words, 1),
        argument(words, 2),
        argument(words, 3),
        argument(words, 4),
        argument(words, 0),
        argument(words, 5),
        argument(words, 6),
    )
    return 0


def pick_rows(
    x: torch.Tensor, numbers: torch.Tensor, team: Team, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x[numbers].

    Args:
        x: [M, W] float32.
        numbers: [R] int64, contiguous, each from 0 to M - 1.
        out: [R, W] float32 to write into.

    Raises:
        TypeError, ValueError: dtypes and shapes that do not fit.
        IndexError: a number that is no row.
    """
    if numbers.dtype != torch.int64 or numbers.dim() != 1 or not numbers.is_contiguous():
        raise TypeError(f"numbers: contiguous int64 [R], got {numbers.dtype} {list(numbers.shape)}")
    source = rows_of(x, x.shape[-1], "x")
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < source.shape[0]:
        raise IndexError(f"numbers: 0 to {source.shape[0] - 1}, got {numbers.tolist()}")
    target = output(out, numbers.numel(), source.shape[1])
    run_job(
        team,
        pick_rows_job,
        numbers.numel(),
        source.data_ptr(),
        4 * source.stride(0),
        source.shape[1],
        numbers.data_ptr(),
        target.data_ptr(),
        4 * target.stride(0),
    )
    return target
