"""The greedy choice: where each row is largest. Knows no sampling.

As torch.argmax: the first of equal values, and a NaN is larger than all. Participants share the columns; each
finds its part's largest, then the parts are compared in order.
"""

from __future__ import annotations

import torch

from shoal.cpu_kernels.arguments import argument, run_job
from shoal.cpu_kernels.memory import load_float32, load_int64, store_float32, store_int64
from shoal.jit.compile import kernel
from shoal.jit.team import Team

__all__ = ["argmax", "argmax_merge_job", "argmax_merge_part", "argmax_part", "argmax_part_job"]

_CHUNK = 64  # columns compared with the largest so far before any is looked at alone
PART_BYTES = 16  # one participant's result for one row: a float32, and behind 8 bytes an int64


@kernel(fastmath=False)
def _is_larger(value: float, best: float) -> bool:
    return value > best or (value != value and best == best)


@kernel(fastmath=False)
def _largest(x: int, first: int, last: int) -> int:
    """Where the row ``x`` is largest between ``first`` and ``last``; -1 where that is empty."""
    if first >= last:
        return -1
    place = first
    best = load_float32(x, first)
    for start in range(first, last, _CHUNK):
        end = min(start + _CHUNK, last)
        larger = 0
        for i in range(start, end):
            larger += not (load_float32(x, i) <= best)  # counts NaN too
        if larger > 0:
            for i in range(start, end):
                value = load_float32(x, i)
                if _is_larger(value, best):
                    best, place = value, i
            if best != best:
                return place
    return place


@kernel(fastmath=False)
def argmax_part(index: int, count: int, x: int, x_bytes: int, rows: int, columns: int, parts: int) -> None:
    """The largest in the columns of participant ``index`` of ``count``, for every row.

    Args:
        x: address of the first row, [columns] float32, ``x_bytes`` from one to the next.
        parts: address of [rows, count] results of PART_BYTES.
    """
    for row in range(rows):
        source, spot = x + row * x_bytes, parts + (row * count + index) * PART_BYTES
        place = _largest(source, columns * index // count, columns * (index + 1) // count)
        store_int64(spot, 1, place)
        if place >= 0:
            store_float32(spot, 0, load_float32(source, place))


@kernel(fastmath=False)
def argmax_merge_part(index: int, count: int, parts: int, rows: int, num_parts: int, out: int) -> None:
    """The largest of each row's ``num_parts`` results, as int64 at ``out`` [rows]; rows are shared."""
    for row in range(rows * index // count, rows * (index + 1) // count):
        place = -1
        best = 0.0
        for part in range(num_parts):
            spot = parts + (row * num_parts + part) * PART_BYTES
            candidate = load_int64(spot, 1)
            if candidate >= 0 and (place < 0 or _is_larger(load_float32(spot, 0), best)):
                best, place = load_float32(spot, 0), candidate
        store_int64(out, row, place)


@kernel(fastmath=False)
def argmax_part_job(index: int, count: int, words: int) -> int:
    """:func:`argmax_part` as a job; its words: rows, x, x_bytes, columns, parts."""
    rows, columns = argument(words, 0), argument(words, 3)
    argmax_part(index, count, argument(words, 1), argument(words, 2), rows, columns, argument(words, 4))
    return 0


@kernel(fastmath=False)
def argmax_merge_job(index: int, count: int, words: int) -> int:
    """:func:`argmax_merge_part` as a job; its words: rows, parts, num_parts, out."""
    rows, num_parts = argument(words, 0), argument(words, 2)
    argmax_merge_part(index, count, argument(words, 1), rows, num_parts, argument(words, 3))
    return 0


def argmax(x: torch.Tensor, team: Team) -> torch.Tensor:
    """Where each row is largest.

    Args:
        x: [M, N] float32, rows contiguous, N at least 1.

    Returns:
        [M] int64.

    Raises:
        TypeError, ValueError: another dtype or shape.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"x: float32, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] == 0 or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"x: [M, N] with contiguous rows, got {list(x.shape)}")
    rows, columns = x.shape
    parts = torch.empty(rows * team.num_threads * PART_BYTES, dtype=torch.uint8)
    out = torch.empty(rows, dtype=torch.int64)
    run_job(team, argmax_part_job, rows, x.data_ptr(), 4 * x.stride(0), columns, parts.data_ptr())
    run_job(team, argmax_merge_job, rows, parts.data_ptr(), team.num_threads, out.data_ptr())
    return out
