"""Sums of a few values, each times a factor, row by row. Knows no model."""

from __future__ import annotations

from shoal.cpu_kernels.arguments import argument, argument_float
from shoal.cpu_kernels.memory import load_float32, store_float32
from shoal.jit.compile import kernel

__all__ = ["MOST_TERMS", "combine_job"]

MOST_TERMS = 3
_FIRST_TERM, _TERM_WORDS = 5, 3


@kernel(fastmath=False)
def combine_job(index: int, count: int, words: int) -> int:
    """out = the sum of up to MOST_TERMS values, each times a factor, the rows of one participant.

    Its words: rows, width, out, out_bytes, number of terms; then for each of MOST_TERMS terms its address,
    bytes from row to row, factor (float). All are [rows, width] float32; ``out`` may be a term.
    """
    rows, width, terms = argument(words, 0), argument(words, 1), argument(words, 4)
    for row in range(rows * index // count, rows * (index + 1) // count):
        target = argument(words, 2) + row * argument(words, 3)
        for i in range(width):
            total = 0.0
            for term in range(terms):
                place = _FIRST_TERM + _TERM_WORDS * term
                source = argument(words, place) + row * argument(words, place + 1)
                total += load_float32(source, i) * argument_float(words, place + 2)
            store_float32(target, i, total)
    return 0
