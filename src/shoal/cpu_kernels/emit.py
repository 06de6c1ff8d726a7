"""LLVM IR that several kernels are put together from. Knows no kernel.

A vector is one panel: 16 floats, whatever the processor's registers hold; LLVM cuts it to those. numba puts a
kernel's fastmath flags on the code emitted into it too: kernels whose order of operations matters are
compiled without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

__all__ = [
    "FLOATS",
    "PANEL",
    "WORDS",
    "counted",
    "fuse",
    "instruction",
    "load_vector",
    "store_vector",
]

PANEL = 16  # columns of one panel of packed weights, and lanes of a vector
FLOATS = ir.VectorType(ir.FloatType(), PANEL)
WORDS = ir.VectorType(ir.IntType(32), PANEL)

_I64 = ir.IntType(64)

Body = Callable[[Any, list[Any]], list[Any]]


def instruction(signature: Any, emit: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """What a numba intrinsic returns: its signature, and a code emitter from (builder, arguments) to a
    value, or None where it gives nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = emit(builder, arguments)
        return context.get_dummy_value() if value is None else value

    return signature, generate


def load_vector(builder: Any, address: Any, kind: Any = FLOATS, align: int = 4) -> Any:
    """The 16 elements at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), typ=kind, align=align)


def store_vector(builder: Any, value: Any, address: Any) -> None:
    """Write 16 floats to an address."""
    builder.store(value, builder.inttoptr(address, FLOATS.as_pointer()), align=4)


def fuse(builder: Any, first: Any, second: Any, addend: Any) -> Any:
    """first * second + addend for floats or vectors of them, rounded once where the processor can."""
    kind = first.type
    name = "llvm.fmuladd." + (f"v{PANEL}f32" if kind == FLOATS else "f32")
    known = builder.module.globals.get(name)
    function = known or ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name=name)
    return builder.call(function, [first, second, addend])


def counted(builder: Any, count: Any, carried: list[Any], body: Body) -> list[Any]:
    """``for index in range(count)``: ``body`` maps (index, carried values) to the next values.

    Returns:
        The carried values after the loop.
    """
    before = builder.block
    loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed(">", count, _I64(0)), loop, after)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), before)
    values = [builder.phi(value.type) for value in carried]
    for value, first in zip(values, carried, strict=True):
        value.add_incoming(first, before)
    following = body(index, values)
    next_index = builder.add(index, _I64(1))
    last = builder.block
    index.add_incoming(next_index, last)
    for value, after_body in zip(values, following, strict=True):
        value.add_incoming(after_body, last)
    builder.cbranch(builder.icmp_signed("<", next_index, count), loop, after)
    builder.position_at_end(after)
    results = [builder.phi(value.type) for value in carried]
    for result, first, after_body in zip(results, carried, following, strict=True):
        result.add_incoming(first, before)
        result.add_incoming(after_body, last)
    return results
