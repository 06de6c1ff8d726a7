"""How packed weights are read into registers, one small class per storage.

Knows no product and no layout above a panel.

Each emits LLVM IR: given the address of a step (a few consecutive ``k`` of one panel of 16 columns), the
weights as vectors of 16 floats, one per ``k``. All arithmetic of the products is in float32.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from llvmlite import ir

from shoal.cpu_kernels.emit import FLOATS, PANEL, WORDS, fuse, load_vector

__all__ = ["BFLOAT16", "FLOAT32", "FORMATS", "INT4", "INT8", "WeightFormat"]

# Numbers of the storages, as kernels and descriptors carry them.
FLOAT32, BFLOAT16, INT8, INT4 = 0, 1, 2, 3

_I64 = ir.IntType(64)
_HALVES = ir.VectorType(ir.IntType(16), PANEL)
_BYTES = ir.VectorType(ir.IntType(8), PANEL)


def _splat(value: int) -> Any:
    return ir.Constant(WORDS, [value] * PANEL)


class WeightFormat(Protocol):
    """One storage of a panel."""

    step_depth: ClassVar[int]  # values of k that one step brings
    step_bytes: ClassVar[int]
    is_grouped: ClassVar[bool]  # has a scale and an offset per group of k

    def group(self, builder: Any, table: Any) -> tuple[Any, ...]:
        """What the steps of one group need, read from the group's row of the table (an address)."""
        ...

    def step(self, builder: Any, address: Any, group: tuple[Any, ...]) -> list[Any]:
        """The weights of one step, ``step_depth`` vectors of 16 floats."""
        ...


class Float32:
    """16 floats for each k."""

    step_depth: ClassVar[int] = 1
    step_bytes: ClassVar[int] = 64
    is_grouped: ClassVar[bool] = False

    def group(self, builder: Any, table: Any) -> tuple[Any, ...]:
        return ()

    def step(self, builder: Any, address: Any, group: tuple[Any, ...]) -> list[Any]:
        return [load_vector(builder, address)]


class BFloat16:
    """16 upper halves of floats for each k."""

    step_depth: ClassVar[int] = 1
    step_bytes: ClassVar[int] = 32
    is_grouped: ClassVar[bool] = False

    def group(self, builder: Any, table: Any) -> tuple[Any, ...]:
        return ()

    def step(self, builder: Any, address: Any, group: tuple[Any, ...]) -> list[Any]:
        return [_widen(builder, load_vector(builder, address, _HALVES, align=2))]


class Int8:
    """16 signed bytes for each k; the scale of each column is applied to the sum, by the caller."""

    step_depth: ClassVar[int] = 1
    step_bytes: ClassVar[int] = 16
    is_grouped: ClassVar[bool] = False

    def group(self, builder: Any, table: Any) -> tuple[Any, ...]:
        return ()

    def step(self, builder: Any, address: Any, group: tuple[Any, ...]) -> list[Any]:
        words = builder.sext(load_vector(builder, address, _BYTES, align=1), WORDS)
        return [builder.sitofp(words, FLOATS)]


class Int4:
    """16 bytes for two k: the lower half byte is the first's, the upper the second's, 0 to 15.

    weight = scale * number + offset; a group's row of the table is 16 scales and 16 offsets in bfloat16.
    """

    step_depth: ClassVar[int] = 2
    step_bytes: ClassVar[int] = 16
    is_grouped: ClassVar[bool] = True

    def group(self, builder: Any, table: Any) -> tuple[Any, ...]:
        offsets = builder.add(table, _I64(2 * PANEL))
        return tuple(_widen(builder, load_vector(builder, at, _HALVES, align=2)) for at in (table, offsets))

    def step(self, builder: Any, address: Any, group: tuple[Any, ...]) -> list[Any]:
        scale, offset = group
        words = builder.zext(load_vector(builder, address, _BYTES, align=1), WORDS)
        numbers = [builder.and_(words, _splat(15)), builder.lshr(words, _splat(4))]
        return [fuse(builder, scale, builder.sitofp(number, FLOATS), offset) for number in numbers]


def _widen(builder: Any, halves: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(halves, WORDS), _splat(16)), FLOATS)


FORMATS: tuple[WeightFormat, ...] = (Float32(), BFloat16(), Int8(), Int4())  # by number
