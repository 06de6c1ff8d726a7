"""The two products of attention, scores and weighted values, and the transposition between them and pages.

Knows no sequence. Rows go together in registers, up to :data:`MOST_ROWS`, two vectors of columns wide; each
number is one chain of fused multiply-adds in the order of the summed index, whatever rows lie beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoal.cpu_kernels.attention_ir import (
    F32,
    I64,
    call_vector,
    constant,
    everywhere,
    floats,
    host_lanes,
    load,
    load_columns,
    load_vector,
    store,
)
from shoal.cpu_kernels.attention_vectors import vector_lanes
from shoal.cpu_kernels.memory import load_bfloat16, load_float32, load_int64, store_float32
from shoal.jit.compile import kernel

__all__ = ["load_item", "score_product", "transpose_tile", "value_product"]

MOST_ROWS = 6
"""6 rows of 2 vectors fill the sixteen vector registers of AVX2 but for the operands."""

_ARGUMENTS = 10


def _product_intrinsic(vectors: int, is_bfloat16: bool, is_indexed: bool) -> Any:
    """An intrinsic for ``out[r, :] = sum over k in first..last of left[r, k] * right(k)[:]``.

    Its arguments, all int64: rows, left (address of float32), left_stride (bytes), first, last (at least one
    k), right (address), right_stride (bytes), slots (address of int64; right(k) is at ``right + slots[k] *
    right_stride``, or at ``right + k * right_stride`` where not indexed), out (address of float32),
    out_stride.
    """

    def product(
        typing: Any, rows: Any, left: Any, left_stride: Any, first: Any, last: Any, right: Any,
        right_stride: Any, slots: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows, left, left_stride, first, last, right, right_stride, slots, out, out_stride = arguments

            def right_vectors(k: Any) -> list[Any]:
                row = load(builder, builder.add(slots, builder.shl(k, constant(3))), I64) if is_indexed else k
                start = builder.add(right, builder.mul(row, right_stride))
                width = host_lanes() * (2 if is_bfloat16 else 4)
                return [
                    load_vector(builder, builder.add(start, constant(v * width)), is_bfloat16)
                    for v in range(vectors)
                ]

            def some_rows(count: int, left: Any, out: Any) -> None:
                lefts = [builder.add(left, builder.mul(left_stride, constant(row))) for row in range(count)]
                sums = _emit_sums(builder, lefts, first, last, vectors, right_vectors)
                for row in range(count):
                    start = builder.add(out, builder.mul(out_stride, constant(row)))
                    for v in range(vectors):
                        store(builder, sums[row][v], builder.add(start, constant(4 * v * host_lanes())))

            _emit_row_groups(builder, rows, (left, left_stride), (out, out_stride), some_rows)
            return context.get_dummy_value()

        return types.void(*[types.int64] * _ARGUMENTS), generate

    return intrinsic(product)


def _emit_row_groups(
    builder: Any,
    rows: Any,
    left: tuple[Any, Any],
    out: tuple[Any, Any],
    some_rows: Callable[[int, Any, Any], None],
) -> None:
    """Full groups of rows in a loop, then the rest as one group. ``left`` and ``out``: address and stride."""
    before, head, full, rest, end = builder.block, *(builder.append_basic_block() for _ in range(4))
    builder.branch(head)
    builder.position_at_end(head)
    remaining, left_at, out_at = (builder.phi(I64) for _ in range(3))
    for phi, start in ((remaining, rows), (left_at, left[0]), (out_at, out[0])):
        phi.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed(">=", remaining, constant(MOST_ROWS)), full, rest)

    builder.position_at_end(full)
    some_rows(MOST_ROWS, left_at, out_at)
    step = constant(MOST_ROWS)
    remaining.add_incoming(builder.sub(remaining, step), builder.block)
    left_at.add_incoming(builder.add(left_at, builder.mul(left[1], step)), builder.block)
    out_at.add_incoming(builder.add(out_at, builder.mul(out[1], step)), builder.block)
    builder.branch(head)

    builder.position_at_end(rest)
    switch = builder.switch(remaining, end)
    for count in range(1, MOST_ROWS):
        block = builder.append_basic_block()
        switch.add_case(constant(count), block)
        builder.position_at_end(block)
        some_rows(count, left_at, out_at)
        builder.branch(end)
    builder.position_at_end(end)


def _emit_sums(
    builder: Any,
    lefts: list[Any],
    first: Any,
    last: Any,
    vectors: int,
    right_vectors: Callable[[Any], list[Any]],
) -> list[list[Any]]:
    """The loop over k with all sums in registers; [rows][vectors] of them afterwards."""
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(I64)
    k.add_incoming(first, before)
    sums = [[builder.phi(ir.VectorType(F32, host_lanes())) for _ in range(vectors)] for _ in lefts]
    operands = right_vectors(k)
    offset = builder.shl(k, constant(2))
    following = []
    for row, address in zip(sums, lefts, strict=True):
        factor = everywhere(builder, load(builder, builder.add(address, offset), F32))
        following.append(
            [
                call_vector(builder, "llvm.fma", [factor, operand, sum_])
                for operand, sum_ in zip(operands, row, strict=True)
            ]
        )
    further = builder.add(k, constant(1))
    k.add_incoming(further, builder.block)
    for row, row_following in zip(sums, following, strict=True):
        for sum_, next_sum in zip(row, row_following, strict=True):
            sum_.add_incoming(floats(0.0), before)
            sum_.add_incoming(next_sum, builder.block)
    builder.cbranch(builder.icmp_signed("<", further, last), loop, after)
    builder.position_at_end(after)
    return following


_score_product = _product_intrinsic(2, is_bfloat16=False, is_indexed=False)
_float32_pair = _product_intrinsic(2, is_bfloat16=False, is_indexed=True)
_float32_one = _product_intrinsic(1, is_bfloat16=False, is_indexed=True)
_bfloat16_pair = _product_intrinsic(2, is_bfloat16=True, is_indexed=True)
_bfloat16_one = _product_intrinsic(1, is_bfloat16=True, is_indexed=True)


@kernel(fastmath=False, inline="always")
def load_item(address: int, index: int, is_bfloat16: int) -> Any:
    """Element ``index`` of float32 or bfloat16 at an address, as float32."""
    return load_bfloat16(address, index) if is_bfloat16 else load_float32(address, index)


@kernel(fastmath=False)
def score_product(
    rows: int, queries: int, query_stride: int, width: int, keys: int, out: int, out_stride: int
) -> None:
    """Scores of ``rows`` queries against two vectors of keys.

    Args:
        queries: address of float32 [rows, width], ``query_stride`` bytes apart.
        keys: address of float32 [width, 2 * lanes], contiguous: :func:`transpose_tile` writes it.
        out: address of float32 [rows, 2 * lanes], ``out_stride`` bytes apart.
    """
    _score_product(rows, queries, query_stride, 0, width, keys, 8 * vector_lanes(), 0, out, out_stride)


@kernel(fastmath=False)
def value_product(
    rows: int, weights: int, weight_stride: int, first: int, last: int, values: int, value_stride: int,
    slots: int, width: int, is_bfloat16: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """Weighted sums of value rows ``first`` to ``last`` (at least one), straight out of the pages.

    Args:
        weights: address of float32 [rows, last], ``weight_stride`` bytes apart.
        values: address of one head's first value, the next slot's ``value_stride`` bytes further.
        slots: address of int64 [last]: the slot of each row.
        width: columns.
        out: address of float32 [rows, width], ``out_stride`` bytes apart.
    """
    lanes, item, at = vector_lanes(), 2 if is_bfloat16 else 4, 0
    while at + 2 * lanes <= width:
        right, to = values + at * item, out + 4 * at
        if is_bfloat16:
            _bfloat16_pair(
                rows, weights, weight_stride, first, last, right, value_stride, slots, to, out_stride
            )
        else:
            _float32_pair(
                rows, weights, weight_stride, first, last, right, value_stride, slots, to, out_stride
            )
        at += 2 * lanes
    if at + lanes <= width:
        right, to = values + at * item, out + 4 * at
        if is_bfloat16:
            _bfloat16_one(
                rows, weights, weight_stride, first, last, right, value_stride, slots, to, out_stride
            )
        else:
            _float32_one(
                rows, weights, weight_stride, first, last, right, value_stride, slots, to, out_stride
            )
        at += lanes
    for column in range(at, width):  # less than a vector: a load could leave the pages
        for row in range(rows):
            total = np.float32(0.0)
            for k in range(first, last):
                value = load_item(values + load_int64(slots, k) * value_stride, column, is_bfloat16)
                total += load_float32(weights + row * weight_stride, k) * value
            store_float32(out + row * out_stride, column, total)


def _transpose_intrinsic(is_bfloat16: bool) -> Any:
    """An intrinsic that transposes a square of one vector by one vector.

    Its arguments, all int64: slots (address of one vector's int64), source, source_stride (bytes from slot to
    slot), out (address of float32), out_stride (bytes from column to column of the source).
    """

    def transpose(typing: Any, slots: Any, source: Any, source_stride: Any, out: Any, out_stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            slots, source, source_stride, out, out_stride = arguments
            lanes = host_lanes()
            rows = []
            for row in range(lanes):
                slot = load(builder, builder.add(slots, constant(8 * row)), I64)
                rows.append(builder.add(source, builder.mul(slot, source_stride)))
            for column, vector in enumerate(load_columns(builder, rows, is_bfloat16)):
                store(builder, vector, builder.add(out, builder.mul(out_stride, constant(column))))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return intrinsic(transpose)


_transpose_float32 = _transpose_intrinsic(is_bfloat16=False)
_transpose_bfloat16 = _transpose_intrinsic(is_bfloat16=True)


@kernel(fastmath=False)
def transpose_tile(slots: int, keys: int, key_stride: int, width: int, is_bfloat16: int, out: int) -> None:
    """Two vectors' worth of key rows out of the pages into columns.

    Args:
        slots: address of int64 [2 * lanes]: the slot of each key; all may be read.
        keys: address of one head's first key, the next slot's ``key_stride`` bytes further.
        width: of a key.
        out: address of float32 [width, 2 * lanes], contiguous.
    """
    lanes, item = vector_lanes(), 2 if is_bfloat16 else 4
    whole = width - width % lanes
    for half in range(2):
        half_slots, half_out = slots + 8 * lanes * half, out + 4 * lanes * half
        for at in range(0, whole, lanes):
            if is_bfloat16:
                _transpose_bfloat16(
                    half_slots, keys + at * item, key_stride, half_out + at * 8 * lanes, 8 * lanes
                )
            else:
                _transpose_float32(
                    half_slots, keys + at * item, key_stride, half_out + at * 8 * lanes, 8 * lanes
                )
        for at in range(whole, width):
            for key in range(lanes):
                source = keys + load_int64(half_slots, key) * key_stride
                store_float32(half_out + at * 8 * lanes, key, load_item(source, at, is_bfloat16))
