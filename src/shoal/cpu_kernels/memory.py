"""Reading and writing memory by address, for kernels. Knows no layout.

Kernels take addresses and ints, so that each has one signature and can be called from another kernel as well
as from Python. ``index`` counts elements from ``address``; nothing is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoal.cpu_kernels.emit import fuse, instruction, load_vector, store_vector

__all__ = [
    "add_panel",
    "add_panels",
    "bits_from_float32",
    "copy_panel",
    "float32_from_bits",
    "fused_multiply_add",
    "load_bfloat16",
    "load_float32",
    "load_float64",
    "load_int64",
    "load_uint8",
    "multiply_panel",
    "stack_floats",
    "store_bfloat16",
    "store_float32",
    "store_int64",
]

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()


def _element(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    """A pointer to an element, as a base and an offset: the vectoriser follows those, not sums of ints."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index], source_etype=kind)


def _load(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    return builder.load(_element(builder, kind, address, index), typ=kind)


@intrinsic  # type: ignore[untyped-decorator]
def load_float32(typing: Any, address: Any, index: Any) -> Any:
    """``load_float32(address, index) -> float32``"""
    return instruction(types.float32(types.int64, types.int64), lambda b, a: _load(b, _F32, a[0], a[1]))


@intrinsic  # type: ignore[untyped-decorator]
def load_float64(typing: Any, address: Any, index: Any) -> Any:
    """``load_float64(address, index) -> float64``"""
    return instruction(types.float64(types.int64, types.int64), lambda b, a: _load(b, _F64, a[0], a[1]))


@intrinsic  # type: ignore[untyped-decorator]
def load_int64(typing: Any, address: Any, index: Any) -> Any:
    """``load_int64(address, index) -> int64``"""
    return instruction(types.int64(types.int64, types.int64), lambda b, a: _load(b, _I64, a[0], a[1]))


@intrinsic  # type: ignore[untyped-decorator]
def load_bfloat16(typing: Any, address: Any, index: Any) -> Any:
    """``load_bfloat16(address, index) -> float32``"""

    def emit(builder: Any, a: Any) -> Any:
        wide = builder.zext(_load(builder, _I16, a[0], a[1]), _I32)
        return builder.bitcast(builder.shl(wide, _I32(16)), _F32)

    return instruction(types.float32(types.int64, types.int64), emit)


@intrinsic  # type: ignore[untyped-decorator]
def load_uint8(typing: Any, address: Any, index: Any) -> Any:
    """``load_uint8(address, index) -> int64``: a byte, 0 to 255."""

    def emit(builder: Any, a: Any) -> Any:
        return builder.zext(_load(builder, _I8, a[0], a[1]), _I64)

    return instruction(types.int64(types.int64, types.int64), emit)


@intrinsic  # type: ignore[untyped-decorator]
def store_float32(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """``store_float32(address, index, value)``"""

    def emit(builder: Any, a: Any) -> None:
        builder.store(a[2], _element(builder, _F32, a[0], a[1]))

    return instruction(types.void(types.int64, types.int64, types.float32), emit)


@intrinsic  # type: ignore[untyped-decorator]
def store_int64(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """``store_int64(address, index, value)``"""

    def emit(builder: Any, a: Any) -> None:
        builder.store(a[2], _element(builder, _I64, a[0], a[1]))

    return instruction(types.void(types.int64, types.int64, types.int64), emit)


@intrinsic  # type: ignore[untyped-decorator]
def store_bfloat16(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """``store_bfloat16(address, index, value)``: a float32, rounded to nearest even; NaN stays NaN."""

    def emit(builder: Any, a: Any) -> None:
        bits = builder.bitcast(a[2], _I32)
        last = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.add(bits, builder.add(last, _I32(0x7FFF)))
        quiet = builder.or_(bits, _I32(0x400000))
        kept = builder.select(builder.fcmp_unordered("uno", a[2], a[2]), quiet, rounded)
        half = builder.trunc(builder.lshr(kept, _I32(16)), _I16)
        builder.store(half, _element(builder, _I16, a[0], a[1]))

    return instruction(types.void(types.int64, types.int64, types.float32), emit)


@intrinsic  # type: ignore[untyped-decorator]
def bits_from_float32(typing: Any, value: Any) -> Any:
    """``bits_from_float32(value) -> int32``"""
    return instruction(types.int32(types.float32), lambda b, a: b.bitcast(a[0], _I32))


@intrinsic  # type: ignore[untyped-decorator]
def float32_from_bits(typing: Any, bits: Any) -> Any:
    """``float32_from_bits(bits) -> float32``"""
    return instruction(types.float32(types.int32), lambda b, a: b.bitcast(a[0], _F32))


@intrinsic  # type: ignore[untyped-decorator]
def fused_multiply_add(typing: Any, first: Any, second: Any, addend: Any) -> Any:
    """``fused_multiply_add(first, second, addend) -> float32``: rounded once where the processor can."""

    return instruction(
        types.float32(types.float32, types.float32, types.float32), lambda b, a: fuse(b, a[0], a[1], a[2])
    )


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def stack_floats(typing: Any, count: Any) -> Any:
    """``stack_floats(count) -> address`` of uninitialised floats, as long as the calling function runs.

    ``count`` is a constant. The memory is aligned to a cache line.
    """
    length = count.literal_value

    def emit(builder: Any, a: Any) -> Any:
        with builder.goto_entry_block():
            spot = builder.alloca(ir.ArrayType(_F32, length))
            spot.align = 64
        return builder.ptrtoint(spot, _I64)

    return instruction(types.int64(count), emit)


@intrinsic  # type: ignore[untyped-decorator]
def copy_panel(typing: Any, target: Any, source: Any) -> Any:
    """``copy_panel(target, source)``: 16 floats."""

    def emit(builder: Any, a: Any) -> None:
        store_vector(builder, load_vector(builder, a[1]), a[0])

    return instruction(types.void(types.int64, types.int64), emit)


@intrinsic  # type: ignore[untyped-decorator]
def add_panel(typing: Any, target: Any, source: Any) -> Any:
    """``add_panel(target, source)``: target += source, 16 floats."""

    def emit(builder: Any, a: Any) -> None:
        total = builder.fadd(load_vector(builder, a[0]), load_vector(builder, a[1]))
        store_vector(builder, total, a[0])

    return instruction(types.void(types.int64, types.int64), emit)


@intrinsic  # type: ignore[untyped-decorator]
def add_panels(typing: Any, target: Any, first: Any, second: Any) -> Any:
    """``add_panels(target, first, second)``: target = first + second, 16 floats."""

    def emit(builder: Any, a: Any) -> None:
        total = builder.fadd(load_vector(builder, a[1]), load_vector(builder, a[2]))
        store_vector(builder, total, a[0])

    return instruction(types.void(types.int64, types.int64, types.int64), emit)


@intrinsic  # type: ignore[untyped-decorator]
def multiply_panel(typing: Any, target: Any, source: Any) -> Any:
    """``multiply_panel(target, source)``: target *= source, 16 floats."""

    def emit(builder: Any, a: Any) -> None:
        product = builder.fmul(load_vector(builder, a[0]), load_vector(builder, a[1]))
        store_vector(builder, product, a[0])

    return instruction(types.void(types.int64, types.int64), emit)
