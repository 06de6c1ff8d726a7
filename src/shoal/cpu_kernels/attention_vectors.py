"""Whole rows of float32 as intrinsics: maxima, exponentials, soft caps, blends. Knows no page.

Each lane of a vector is summed in one order and the lanes in another fixed one, so a row's bits do not depend
on what is computed beside it.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from shoal.cpu_kernels.attention_ir import (
    I8,
    call_vector,
    constant,
    each_vector,
    everywhere,
    exponential,
    floats,
    host_lanes,
    load_vector,
    store,
    tree,
)

__all__ = [
    "blend_vectors",
    "exponentials",
    "largest",
    "softcap_vectors",
    "touch",
    "vector_lanes",
]


@intrinsic  # type: ignore[untyped-decorator]
def vector_lanes(typing: Any) -> Any:
    """``vector_lanes() -> int64``: float32 values of one vector, a constant of the compiled code."""
    return types.int64(), lambda context, builder, signature, arguments: constant(host_lanes())


@intrinsic  # type: ignore[untyped-decorator]
def touch(typing: Any, address: Any) -> Any:
    """``touch(address)``: read the byte there, and make nothing of it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Atomic, else a compiler leaves out what nobody uses.
        builder.load_atomic(builder.inttoptr(arguments[0], I8.as_pointer()), "monotonic", 1)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def largest(typing: Any, address: Any, count: Any) -> Any:
    """``largest(address, count) -> float32`` of ``count`` float32, whole vectors; any if one is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)  # one instruction on x86

        address, count = arguments
        best = each_vector(
            builder,
            address,
            count,
            floats(float("-inf")),
            lambda at, so_far: larger(so_far, load_vector(builder, at, False)),
        )
        return tree(builder, best, larger)

    return types.float32(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def exponentials(typing: Any, address: Any, count: Any, shift: Any) -> Any:
    """``exponentials(address, count, shift) -> float32``: x becomes exp(x - shift) in place; their sum."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count, shift = arguments
        shifts = everywhere(builder, shift)

        def one(at: Any, so_far: Any) -> Any:
            value = exponential(builder, builder.fsub(load_vector(builder, at, False), shifts))
            store(builder, value, at)
            return builder.fadd(so_far, value)

        sums = each_vector(builder, address, count, floats(0.0), one)
        return tree(builder, sums, builder.fadd)

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def softcap_vectors(typing: Any, address: Any, count: Any, cap: Any) -> Any:
    """``softcap_vectors(address, count, cap)``: x becomes cap * tanh(x / cap) in place, whole vectors.

    tanh y = 1 - 2 / (exp(2 y) + 1): its error of some 1e-7 is absolute, as a logit's should be.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count, cap = arguments
        caps = everywhere(builder, cap)

        def one(at: Any, carried: Any) -> Any:
            ratio = builder.fdiv(load_vector(builder, at, False), caps)
            power = exponential(builder, builder.fadd(ratio, ratio), is_capped=True)
            share = builder.fdiv(floats(2.0), builder.fadd(power, floats(1.0)))
            store(builder, builder.fmul(caps, builder.fsub(floats(1.0), share)), at)
            return carried

        each_vector(builder, address, count, floats(0.0), one)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def blend_vectors(typing: Any, target: Any, source: Any, count: Any, keep: Any, take: Any) -> Any:
    """``blend_vectors(target, source, count, keep, take)``: target becomes target * keep + source * take.

    Args:
        target, source: addresses of ``count`` float32, whole vectors.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, count, keep, take = arguments
        keeps, takes = everywhere(builder, keep), everywhere(builder, take)

        def one(at: Any, carried: Any) -> Any:
            other = builder.add(source, builder.sub(at, target))
            kept = builder.fmul(load_vector(builder, at, False), keeps)
            store(
                builder,
                call_vector(builder, "llvm.fma", [load_vector(builder, other, False), takes, kept]),
                at,
            )
            return carried

        each_vector(builder, target, count, floats(0.0), one)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.float32), generate
