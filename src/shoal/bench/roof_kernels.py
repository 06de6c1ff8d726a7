"""The kernels that the machine's limits are measured with. Knows no clock."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoal.cpu_kernels.attention_ir import host_lanes
from shoal.cpu_kernels.emit import counted, instruction
from shoal.jit.compile import kernel
from shoal.jit.views import array_at

__all__ = ["CALL_LENGTH", "CHAINS", "COUNT", "NUMBERS", "RESULTS", "multiply_all", "read_all"]

# Words of a call: float32 numbers, how many, and where each part's sum goes.
NUMBERS, COUNT, RESULTS = 0, 1, 2
CALL_LENGTH = 3
CHAINS = 14  # of products that wait for nothing but themselves: as many as fill any processor's units
_I32 = ir.IntType(32)


@kernel
def read_all(index: int, count: int, call: int) -> int:
    """Part ``index`` of ``count`` of a sum over float32 numbers: each is read once, in order."""
    words = array_at(call, CALL_LENGTH, numpy.int64)
    share = words[COUNT] // count
    numbers = array_at(words[NUMBERS] + 4 * index * share, share, numpy.float32)
    total = numpy.float32(0.0)
    for at in range(share):
        total += numbers[at]
    array_at(words[RESULTS], count, numpy.float32)[index] = total  # else nothing need be read
    return 0


@kernel
def multiply_all(index: int, count: int, call: int) -> int:
    """Every part multiplies and adds in registers, COUNT times in each lane of each chain. The factor is the
    first of the numbers."""
    words = array_at(call, CALL_LENGTH, numpy.int64)
    factor = array_at(words[NUMBERS], 1, numpy.float32)[0]
    array_at(words[RESULTS], count, numpy.float32)[index] = _chains(words[COUNT], factor)
    return 0


@intrinsic  # type: ignore[untyped-decorator]
def _chains(typing: Any, repeats: Any, factor: Any) -> Any:
    """x = x * factor + factor, again and again in CHAINS vectors; the sum of their first lanes."""

    def emit(builder: Any, arguments: Any) -> Any:
        repeats, factor = arguments
        kind = ir.VectorType(ir.FloatType(), host_lanes())
        name = f"llvm.fma.v{host_lanes()}f32"
        known = builder.module.globals.get(name)
        fma = known or ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name=name)
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), factor, ir.Constant(_I32, 0))
        same = ir.Constant(ir.VectorType(_I32, host_lanes()), [0] * host_lanes())
        factors = builder.shuffle_vector(first, first, same)
        starts = [ir.Constant(kind, [float(chain)] * host_lanes()) for chain in range(CHAINS)]
        ends = counted(
            builder, repeats, starts, lambda _, all_: [builder.call(fma, [x, factors, factors]) for x in all_]
        )
        total = reduce(builder.fadd, ends)
        return builder.extract_element(total, ir.Constant(_I32, 0))

    return instruction(types.float32(types.int64, types.float32), emit)
