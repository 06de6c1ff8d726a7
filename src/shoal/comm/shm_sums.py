"""Sums of tensors that lie in several ranks' memory, in rank order: the same bits whoever computes them.

Knows no protocol: everything has been written, and nobody writes. Sixteen-bit floats are summed in float32
and rounded once, to nearest even.
"""

from __future__ import annotations

import numpy

from shoal.jit.compile import kernel
from shoal.jit.views import array_at

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "FLOAT64", "INT32", "INT64", "item_bytes", "sum_parts"]

FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT32, INT64 = 0, 1, 2, 3, 4, 5

_BLOCK = 1024  # elements; a block of the sum stays in the nearest cache while the parts come by


@kernel
def item_bytes(kind: int) -> int:
    """Bytes of an element."""
    if kind in (FLOAT64, INT64):
        return 8
    return 2 if kind in (BFLOAT16, FLOAT16) else 4


@kernel
def sum_parts(kind: int, target: int, first: int, stride: int, parts: int, count: int) -> None:
    """``target[i] = part 0[i] + part 1[i] + ...`` for ``count`` elements.

    Args:
        kind: of the elements, FLOAT32 and so on.
        target: its address, outside the parts.
        first, stride: part p begins at ``first + p * stride`` bytes.
        parts: at least 2.
    """
    size = item_bytes(kind)
    for start in range(0, count, _BLOCK):
        length = min(_BLOCK, count - start)
        to, source = target + start * size, first + start * size
        if kind == FLOAT32:
            _sum_typed(to, source, stride, parts, length, numpy.float32)
        elif kind == FLOAT64:
            _sum_typed(to, source, stride, parts, length, numpy.float64)
        elif kind == INT32:
            _sum_typed(to, source, stride, parts, length, numpy.int32)
        elif kind == INT64:
            _sum_typed(to, source, stride, parts, length, numpy.int64)
        elif kind == BFLOAT16:
            _sum_bfloat16(to, source, stride, parts, length)
        else:
            _sum_float16(to, source, stride, parts, length)


@kernel(fastmath=False)
def _sum_typed(target: int, first: int, stride: int, parts: int, count: int, dtype: type) -> None:
    total = array_at(target, count, dtype)
    left, right = array_at(first, count, dtype), array_at(first + stride, count, dtype)
    for index in range(count):
        total[index] = left[index] + right[index]
    for part in range(2, parts):
        further = array_at(first + part * stride, count, dtype)
        for index in range(count):
            total[index] += further[index]


@kernel(fastmath=False)
def _sum_bfloat16(target: int, first: int, stride: int, parts: int, count: int) -> None:
    sums, result = numpy.empty(count, numpy.float32), array_at(target, count, numpy.uint16)
    bits = sums.view(numpy.uint32)
    wide = numpy.empty(count, numpy.float32)
    wide_bits = wide.view(numpy.uint32)
    for part in range(parts):
        piece = array_at(first + part * stride, count, numpy.uint16)
        for index in range(count):
            wide_bits[index] = numpy.uint32(piece[index]) << numpy.uint32(16)
        _add_or_set(sums, wide, part)
    for index in range(count):
        value = bits[index]
        rounded = value + numpy.uint32(0x7FFF) + ((value >> numpy.uint32(16)) & numpy.uint32(1))
        if sums[index] != sums[index]:
            rounded = numpy.uint32(0x7FC00000)
        result[index] = numpy.uint16(rounded >> numpy.uint32(16))


@kernel(fastmath=False)
def _add_or_set(sums: numpy.ndarray, piece: numpy.ndarray, part: int) -> None:
    if part == 0:
        sums[:] = piece
    else:
        for index in range(sums.shape[0]):
            sums[index] += piece[index]


@kernel(fastmath=False)
def _sum_float16(target: int, first: int, stride: int, parts: int, count: int) -> None:
    sums, result = numpy.empty(count, numpy.float32), array_at(target, count, numpy.uint16)
    wide = numpy.empty(count, numpy.float32)
    for part in range(parts):
        _widen_float16(array_at(first + part * stride, count, numpy.uint16), wide)
        _add_or_set(sums, wide, part)
    _narrow_float16(sums, result)


@kernel(fastmath=False)
def _widen_float16(half: numpy.ndarray, wide: numpy.ndarray) -> None:
    """float16 bits to float32. The bits moved in place are the value times 2**-112, subnormals included."""
    bits = wide.view(numpy.uint32)
    for index in range(half.shape[0]):
        magnitude = numpy.uint32(half[index]) & numpy.uint32(0x7FFF)
        sign = (numpy.uint32(half[index]) & numpy.uint32(0x8000)) << numpy.uint32(16)
        bits[index] = magnitude << numpy.uint32(13)
        wide[index] = wide[index] * numpy.float32(2.0**112)
        if magnitude >= numpy.uint32(0x7C00):  # infinity and NaN
            bits[index] = (magnitude << numpy.uint32(13)) | numpy.uint32(0x7F800000)
        bits[index] |= sign


@kernel(fastmath=False)
def _narrow_float16(wide: numpy.ndarray, half: numpy.ndarray) -> None:
    """float32 to float16 bits, to nearest even; beyond 65,519 to infinity.

    Subnormals are rounded by the adder: 0.5 holds in its last bits the multiples of 2**-24.
    """
    bits = wide.view(numpy.uint32)
    for index in range(wide.shape[0]):
        sign = (bits[index] >> numpy.uint32(16)) & numpy.uint32(0x8000)
        magnitude = bits[index] & numpy.uint32(0x7FFFFFFF)
        if magnitude > numpy.uint32(0x7F800000):
            narrow = numpy.uint32(0x7E00)
        elif magnitude >= numpy.uint32(0x477FF000):
            narrow = numpy.uint32(0x7C00)
        elif magnitude >= numpy.uint32(0x38800000):
            odd = (magnitude >> numpy.uint32(13)) & numpy.uint32(1)
            narrow = (magnitude - numpy.uint32(0x38000000) + numpy.uint32(0xFFF) + odd) >> numpy.uint32(13)
        else:
            bits[index] = magnitude
            wide[index] = wide[index] + numpy.float32(0.5)
            narrow = bits[index] - numpy.uint32(0x3F000000)
        half[index] = numpy.uint16(sign | narrow)
