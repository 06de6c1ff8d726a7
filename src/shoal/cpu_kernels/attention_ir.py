"""Emitters of the vector instructions that attention's kernels are made of. Knows no kernel and no page.

Everything goes by byte addresses (int64). A vector holds as many float32 as the processor's registers: the
number is asked for when a kernel is compiled, not at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core.registry import cpu_target

__all__ = [
    "F32",
    "I8",
    "I16",
    "I32",
    "I64",
    "call_vector",
    "constant",
    "each_vector",
    "everywhere",
    "exponential",
    "floats",
    "host_lanes",
    "indices",
    "load",
    "load_columns",
    "load_item_at",
    "load_vector",
    "store",
    "tree",
]

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_EXP_LEAST = -87.0  # below it the result is 0, not a denormal
_EXP_MOST = 88.0
# Cephes' expf: x = n log 2 + r, exp r by a polynomial; below 2 units in the last place.
_LOG2_E = 1.44269504088896341
_LOG2_HIGH, _LOG2_LOW = 0.693359375, -2.12194440e-4
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)


def host_lanes() -> int:
    """float32 lanes of the widest vectors of the processor that numba compiles for."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    names = features.split(",")
    if "+avx512f" in names:
        return 16
    return 8 if "+avx2" in names else 4


def constant(value: int) -> Any:
    return ir.Constant(I64, value)


def floats(value: float) -> Any:
    return ir.Constant(ir.VectorType(F32, host_lanes()), [value] * host_lanes())


def indices(values: list[int]) -> Any:
    return ir.Constant(ir.VectorType(I32, len(values)), values)


def load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def load_vector(builder: Any, address: Any, is_bfloat16: bool) -> Any:
    """A vector of float32."""
    lanes = host_lanes()
    if not is_bfloat16:
        return load(builder, address, ir.VectorType(F32, lanes))
    return _widened(builder, load(builder, address, ir.VectorType(I16, lanes), 2))


def everywhere(builder: Any, scalar: Any) -> Any:
    """A vector with ``scalar`` in every lane."""
    empty = ir.Constant(ir.VectorType(scalar.type, host_lanes()), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, empty, indices([0] * host_lanes()))


def call_vector(builder: Any, name: str, arguments: list[Any]) -> Any:
    """Call LLVM's intrinsic on float vectors, say ``llvm.fma``."""
    full = f"{name}.v{host_lanes()}f32"
    kind = ir.VectorType(F32, host_lanes())
    function = builder.module.globals.get(full)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(arguments)), name=full)
    return builder.call(function, arguments)


def exponential(builder: Any, x: Any, is_capped: bool = False) -> Any:
    """exp of a vector: 0 below -87, NaN stays NaN. Beyond 88 it is no number, or exp(88) where capped."""
    lanes = host_lanes()
    is_tiny = builder.fcmp_ordered("<", x, floats(_EXP_LEAST))
    if is_capped:
        x = builder.select(builder.fcmp_ordered(">", x, floats(_EXP_MOST)), floats(_EXP_MOST), x)
    whole = call_vector(
        builder, "llvm.floor", [call_vector(builder, "llvm.fma", [x, floats(_LOG2_E), floats(0.5)])]
    )
    rest = call_vector(builder, "llvm.fma", [whole, floats(-_LOG2_HIGH), x])
    rest = call_vector(builder, "llvm.fma", [whole, floats(-_LOG2_LOW), rest])
    sum_ = floats(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        sum_ = call_vector(builder, "llvm.fma", [sum_, rest, floats(term)])
    square = builder.fmul(rest, rest)
    sum_ = builder.fadd(call_vector(builder, "llvm.fma", [sum_, square, rest]), floats(1.0))
    integers = ir.VectorType(I32, lanes)
    exponent = builder.add(builder.fptosi(whole, integers), ir.Constant(integers, [127] * lanes))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(integers, [23] * lanes)), x.type)
    return builder.select(is_tiny, floats(0.0), builder.fmul(sum_, power))


def tree(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One scalar of a vector's lanes, combined pairwise in a fixed order."""
    lanes = host_lanes()
    step = lanes // 2
    while step:
        swapped = builder.shuffle_vector(vector, vector, indices([lane ^ step for lane in range(lanes)]))
        vector = combine(vector, swapped)
        step //= 2
    return builder.extract_element(vector, ir.Constant(I32, 0))


def each_vector(builder: Any, address: Any, count: Any, start: Any, body: Callable[[Any, Any], Any]) -> Any:
    """Loop over ``count`` (a multiple of the lanes, at least one vector) float32; carry one vector."""
    before, loop = builder.block, builder.append_basic_block()
    after = builder.append_basic_block()
    end = builder.add(address, builder.shl(count, constant(2)))
    builder.branch(loop)
    builder.position_at_end(loop)
    at, carried = builder.phi(I64), builder.phi(start.type)
    at.add_incoming(address, before)
    carried.add_incoming(start, before)
    following = body(at, carried)
    further = builder.add(at, constant(4 * host_lanes()))
    at.add_incoming(further, builder.block)
    carried.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", further, end), loop, after)
    builder.position_at_end(after)
    return following


def load_item_at(builder: Any, address: Any, is_bfloat16: bool) -> Any:
    """One number as float32."""
    if not is_bfloat16:
        return load(builder, address, F32)
    half = builder.zext(load(builder, address, I16, 2), I32)
    return builder.bitcast(builder.shl(half, ir.Constant(I32, 16)), F32)


def load_columns(builder: Any, rows: list[Any], is_bfloat16: bool) -> list[Any]:
    """The square of numbers that begins at each of one vector's addresses, by columns.

    Four rows at a time lie in the quarters of a vector when they are loaded, so that all that is left is to
    turn squares of four by four, every one within a quarter.
    """
    lanes = host_lanes()
    columns = []
    for first in range(0, lanes, 4):
        offset = constant(first * (2 if is_bfloat16 else 4))
        parts = [
            _load_quarters(builder, [builder.add(row, offset) for row in rows[at::4]], is_bfloat16)
            for at in range(4)
        ]
        columns += _turned_quarters(builder, parts)
    return columns


def _load_quarters(builder: Any, addresses: list[Any], is_bfloat16: bool) -> Any:
    """Four numbers from each address, one after the other."""
    kind = ir.VectorType(I16 if is_bfloat16 else F32, 4)
    parts = [load(builder, address, kind, 2 if is_bfloat16 else 4) for address in addresses]
    while len(parts) > 1:
        both = indices(list(range(2 * parts[0].type.count)))
        parts = [builder.shuffle_vector(a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return _widened(builder, parts[0]) if is_bfloat16 else parts[0]


def _turned_quarters(builder: Any, rows: list[Any]) -> list[Any]:
    """Four vectors, each quarter of them a square that is turned."""
    for _ in range(2):
        rows = [
            builder.shuffle_vector(rows[i], rows[i + 2], _interleaved(half))
            for i in range(2)
            for half in (0, 2)
        ]
    return rows


def _interleaved(half: int) -> Any:
    """In each quarter, two numbers of one vector and two of another in turn."""
    lanes = host_lanes()
    return indices(
        [
            quarter + half + at + which
            for quarter in range(0, lanes, 4)
            for at in range(2)
            for which in (0, lanes)
        ]
    )


def _widened(builder: Any, halves: Any) -> Any:
    """bfloat16 is the upper half of a float32's bits."""
    wide = ir.VectorType(I32, halves.type.count)
    bits = builder.shl(builder.zext(halves, wide), ir.Constant(wide, [16] * halves.type.count))
    return builder.bitcast(bits, ir.VectorType(F32, halves.type.count))


def emit_loop(builder: Any, span: tuple[Any, Any, int], carried: list[Any], body: Any) -> list[Any]:
    """``body(at, carried)`` for each step of a span (first, end, step) that may be empty."""
    first, end, step = span
    before, head, inside, after = builder.block, *(builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    at, phis = builder.phi(I64), [builder.phi(value.type) for value in carried]
    builder.cbranch(builder.icmp_signed("<", at, end), inside, after)
    builder.position_at_end(inside)
    following = body(at, phis)
    at.add_incoming(first, before)
    at.add_incoming(builder.add(at, constant(step)), builder.block)
    for phi, start, next_ in zip(phis, carried, following, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(next_, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return phis
