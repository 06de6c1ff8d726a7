"""Scores of a few queries against keys as they lie in the pages. Knows no sequence.

One vector of keys is turned in registers, and every column multiplied by all queries at once: nothing is put
down between. Each score is the same chain of fused multiply-adds as in
:func:`shoal.cpu_kernels.attention_products.score_product`, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoal.cpu_kernels.attention_ir import (
    F32,
    I32,
    I64,
    call_vector,
    constant,
    emit_loop,
    everywhere,
    floats,
    host_lanes,
    load,
    load_columns,
    load_item_at,
    store,
)
from shoal.cpu_kernels.attention_vectors import vector_lanes
from shoal.jit.compile import kernel

__all__ = ["MOST_QUERIES", "score_few"]

MOST_QUERIES = 6
"""As many as keep their sums in registers beside a vector of keys."""


def _score_intrinsic(is_bfloat16: bool) -> Any:
    """An intrinsic with the arguments of :func:`score_few` but for the kind."""

    def score(
        typing: Any, rows: Any, queries: Any, query_stride: Any, width: Any, slots: Any, keys: Any,
        key_stride: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows, queries, query_stride, width, slots, keys, key_stride, out, out_stride = arguments

            page = _Keys(builder, slots, keys, key_stride, is_bfloat16)
            end = builder.append_basic_block()
            switch = builder.switch(rows, end)
            for count in range(1, MOST_QUERIES + 1):
                block = builder.append_basic_block()
                switch.add_case(constant(count), block)
                builder.position_at_end(block)
                lefts = [
                    builder.add(queries, builder.mul(query_stride, constant(row))) for row in range(count)
                ]
                sums = _emit_sums(builder, lefts, width, page)
                for row, sum_ in enumerate(sums):
                    store(builder, sum_, builder.add(out, builder.mul(out_stride, constant(row))))
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return intrinsic(score)


@dataclass(frozen=True, slots=True)
class _Keys:
    """One vector of keys in the pages."""

    builder: Any
    slots: Any
    start: Any
    stride: Any
    is_bfloat16: bool

    def columns(self, at: Any) -> list[Any]:
        """Columns ``at`` and on, as many as there are keys."""
        return load_columns(self.builder, self._places(at), self.is_bfloat16)

    def column(self, at: Any) -> Any:
        """Column ``at`` alone."""
        column = ir.Constant(ir.VectorType(F32, host_lanes()), ir.Undefined)
        for lane, place in enumerate(self._places(at)):
            item = load_item_at(self.builder, place, self.is_bfloat16)
            column = self.builder.insert_element(column, item, ir.Constant(I32, lane))
        return column

    def _places(self, at: Any) -> list[Any]:
        builder = self.builder
        first = builder.add(self.start, builder.mul(at, constant(2 if self.is_bfloat16 else 4)))
        slots = [
            load(builder, builder.add(self.slots, constant(8 * lane)), I64) for lane in range(host_lanes())
        ]
        return [builder.add(first, builder.mul(slot, self.stride)) for slot in slots]


def _emit_sums(builder: Any, lefts: list[Any], width: Any, keys: _Keys) -> list[Any]:
    """One vector of scores for each query."""
    lanes = host_lanes()

    def square(at: Any, sums: list[Any]) -> list[Any]:
        for number, column in enumerate(keys.columns(at)):
            sums = _add_column(builder, lefts, builder.add(at, constant(number)), column, sums)
        return sums

    whole = builder.and_(width, constant(-lanes))
    sums = emit_loop(builder, (constant(0), whole, lanes), [floats(0.0)] * len(lefts), square)
    # Behind the last whole vector a vector could reach beyond the pages.
    return emit_loop(
        builder,
        (whole, width, 1),
        sums,
        lambda at, own: _add_column(builder, lefts, at, keys.column(at), own),
    )


def _add_column(builder: Any, lefts: list[Any], at: Any, column: Any, sums: list[Any]) -> list[Any]:
    offset = builder.shl(at, constant(2))
    factors = [everywhere(builder, load(builder, builder.add(left, offset), F32)) for left in lefts]
    return [
        call_vector(builder, "llvm.fma", [factor, column, sum_])
        for factor, sum_ in zip(factors, sums, strict=True)
    ]


_score_float32 = _score_intrinsic(is_bfloat16=False)
_score_bfloat16 = _score_intrinsic(is_bfloat16=True)


@kernel(fastmath=False)
def score_few(
    rows: int, queries: int, query_stride: int, width: int, slots: int, keys: int, key_stride: int,
    is_bfloat16: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """Scores of up to :data:`MOST_QUERIES` queries against two vectors of keys.

    Args:
        queries: address of float32 [rows, width], ``query_stride`` bytes apart.
        slots: address of int64 [2 * lanes]: the slot of each key; all may be read.
        keys: address of one head's first key, the next slot's ``key_stride`` bytes further.
        out: address of float32 [rows, 2 * lanes], ``out_stride`` bytes apart.
    """
    lanes = vector_lanes()
    for half in range(2):
        own, to = slots + 8 * lanes * half, out + 4 * lanes * half
        if is_bfloat16:
            _score_bfloat16(rows, queries, query_stride, width, own, keys, key_stride, to, out_stride)
        else:
            _score_float32(rows, queries, query_stride, width, own, keys, key_stride, to, out_stride)
