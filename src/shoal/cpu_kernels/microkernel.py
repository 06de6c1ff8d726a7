"""The product at the bottom of every linear layer: a few rows times a few panels, in registers.

Knows no threads and no layers.

``tile[r, c] += sum over k of x[r, k] * weight[k, c]`` for 1 to 6 rows and up to 4 panels of 16 columns. Each
element is one chain of fused multiply-adds over rising ``k``, never reordered, however many rows and panels
are computed at once and however ``k`` is cut into calls: a row's result does not depend on what it is
computed with.

The code is LLVM IR on vectors of 16 floats. LLVM cuts them to what the processor has: one register of
AVX-512, two of AVX2, four of NEON or SSE. Only the number of panels held at once is chosen here, by the
number of registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoal.cpu_kernels.emit import FLOATS, PANEL, counted, fuse, instruction, load_vector, store_vector
from shoal.cpu_kernels.weight_formats import BFLOAT16, FLOAT32, FORMATS, INT4, INT8, WeightFormat
from shoal.jit.compile import kernel

__all__ = ["CALL_WORDS", "GROUP_PANELS", "MAX_ROWS", "multiply", "multiply_address"]

MAX_ROWS = 6
GROUP_PANELS = 4  # panels of a tile's row

# Words of a call, see :func:`multiply`.
ROWS, PANELS, WEIGHT, PANEL_BYTES, TABLE, TABLE_BYTES, GROUP, X, X_BYTES, DEPTH, TILE, PREFETCH, FURTHER = (
    range(13)
)
CALL_WORDS = 13

_TILE_ROW_BYTES = GROUP_PANELS * PANEL * 4
_UNROLLED_STEPS = 4
_CACHE_LINE = 64

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_SPLAT = ir.Constant(ir.VectorType(_I32, PANEL), [0] * PANEL)


def panels_at_once(rows: int, triple: str, features: str) -> int:
    """How many panels' sums fit into the registers of a processor, given LLVM's names of it."""
    if "+avx512f" in features:
        registers, lanes = 24, 16
    elif triple.startswith(("aarch64", "arm64")):
        registers, lanes = 24, 4
    else:
        registers, lanes = 12, 8  # AVX2; more than the older have, which spill
    fitting = registers // (rows * PANEL // lanes)
    return 4 if fitting >= 4 else 2 if fitting >= 2 else 1


class _Tile:
    """Emits one tile: ``rows`` times ``panels``, sums in registers over the whole depth."""

    def __init__(
        self, builder: Any, storage: WeightFormat, rows: int, panels: int, operands: _Operands
    ) -> None:
        self.builder, self.storage = builder, storage
        self.rows, self.panels = rows, panels
        self.operands = operands
        stride = operands.x_bytes
        self.x_rows = [builder.add(operands.x, builder.mul(stride, _I64(row))) for row in range(rows)]

    def emit(self, weight: Any, table: Any, tile: Any, soon: Any) -> None:
        """Add to the tile at ``tile`` the product with the panels at ``weight``, prefetch ``soon``."""
        b = self.builder
        self.soon = soon
        spots = [
            b.add(tile, _I64(row * _TILE_ROW_BYTES + panel * PANEL * 4))
            for row in range(self.rows)
            for panel in range(self.panels)
        ]
        sums = [load_vector(b, spot) for spot in spots]
        panels = [b.add(weight, b.mul(self.operands.panel_bytes, _I64(p))) for p in range(self.panels)]
        if self.storage.is_grouped:
            sums = self._grouped(panels, table, sums)
        else:
            groups: list[tuple[Any, ...]] = [()] * self.panels
            sums = self._depth(panels, self.x_rows, self.operands.depth, groups, sums, self.soon)
        for spot, value in zip(spots, sums, strict=True):
            store_vector(b, value, spot)

    def _grouped(self, panels: list[Any], table: Any, sums: list[Any]) -> list[Any]:
        """Group after group of k, each with its own scales and offsets."""
        b, o = self.builder, self.operands
        tables = [b.add(table, b.mul(o.table_bytes, _I64(p))) for p in range(self.panels)]
        row_bytes = _I64(4 * PANEL)  # 16 scales and 16 offsets of two bytes
        group_bytes = b.mul(b.sdiv(o.group, _I64(2)), _I64(self.storage.step_bytes))

        def one_group(index: Any, sums: list[Any]) -> list[Any]:
            done = b.mul(index, o.group)
            left = b.sub(o.depth, done)
            depth = b.select(b.icmp_signed("<", left, o.group), left, o.group)
            scales = [self.storage.group(b, b.add(start, b.mul(index, row_bytes))) for start in tables]
            starts = [b.add(panel, b.mul(index, group_bytes)) for panel in panels]
            x_rows = [b.add(row, b.mul(done, _I64(4))) for row in self.x_rows]
            soon = b.add(self.soon, b.mul(index, group_bytes))
            return self._depth(starts, x_rows, depth, scales, sums, soon)

        count = b.sdiv(b.add(o.depth, b.sub(o.group, _I64(1))), o.group)
        return counted(b, count, sums, one_group)

    def _depth(
        self,
        panels: list[Any],
        x_rows: list[Any],
        depth: Any,
        groups: list[tuple[Any, ...]],
        sums: list[Any],
        soon: Any,
    ) -> list[Any]:
        """All of k: unrolled steps, single steps, and where a step brings two k, the odd last one."""
        b, width = self.builder, self.storage.step_depth
        steps = b.sdiv(depth, _I64(width))
        unrolled = b.sdiv(steps, _I64(_UNROLLED_STEPS))
        first_single = b.mul(unrolled, _I64(_UNROLLED_STEPS))

        def several(index: Any, sums: list[Any]) -> list[Any]:
            first = b.mul(index, _I64(_UNROLLED_STEPS))
            self._prefetch(soon, first)
            for step in range(_UNROLLED_STEPS):
                sums = self._step(panels, x_rows, b.add(first, _I64(step)), groups, sums, width)
            return sums

        def single(index: Any, sums: list[Any]) -> list[Any]:
            return self._step(panels, x_rows, b.add(first_single, index), groups, sums, width)

        sums = counted(b, unrolled, sums, several)
        sums = counted(b, b.sub(steps, first_single), sums, single)
        if width == 1:
            return sums
        odd = b.srem(depth, _I64(width))
        return counted(b, odd, sums, lambda _, sums: self._step(panels, x_rows, steps, groups, sums, 1))

    def _step(
        self,
        panels: list[Any],
        x_rows: list[Any],
        step: Any,
        groups: list[tuple[Any, ...]],
        sums: list[Any],
        width: int,
    ) -> list[Any]:
        """One step's ``width`` values of k for every row and panel; sums are row by row."""
        b, storage = self.builder, self.storage
        start = b.mul(step, _I64(storage.step_bytes))
        weights = [
            storage.step(b, b.add(panel, start), group) for panel, group in zip(panels, groups, strict=True)
        ]
        sums = list(sums)
        for k in range(width):
            byte = b.mul(b.add(b.mul(step, _I64(storage.step_depth)), _I64(k)), _I64(4))
            for row, x_row in enumerate(x_rows):
                x = self._broadcast(b.add(x_row, byte))
                for panel in range(self.panels):
                    at = row * self.panels + panel
                    sums[at] = fuse(b, weights[panel][k], x, sums[at])
        return sums

    def _broadcast(self, address: Any) -> Any:
        b = self.builder
        value = b.load(b.inttoptr(address, _F32.as_pointer()), typ=_F32, align=4)
        undefined = ir.Constant(FLOATS, ir.Undefined)
        return b.shuffle_vector(b.insert_element(undefined, value, _I32(0)), undefined, _SPLAT)

    def _prefetch(self, soon: Any, step: Any) -> None:
        """Ask for as many lines of two panels to come as these unrolled steps read of one."""
        b, step_bytes = self.builder, self.storage.step_bytes
        name = "llvm.prefetch.p0"
        known = b.module.globals.get(name)
        signature = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = known or ir.Function(b.module, signature, name=name)
        first = b.add(soon, b.mul(step, _I64(step_bytes)))
        second = b.add(first, self.operands.panel_bytes)
        further = [b.add(start, self.operands.further) for start in (first, second)]
        for start in (first, second, *further):
            for line in range(0, _UNROLLED_STEPS * step_bytes, _CACHE_LINE):
                pointer = b.inttoptr(b.add(start, _I64(line)), _I8.as_pointer())
                b.call(function, [pointer, _I32(0), _I32(2), _I32(1)])  # read, into the second level, data


class _Operands:
    """The words of a call, by name."""

    def __init__(self, builder: Any, call: Any) -> None:
        words = builder.inttoptr(call, _I64.as_pointer())

        def word(position: int) -> Any:
            return builder.load(builder.gep(words, [_I64(position)], source_etype=_I64), typ=_I64)

        self.rows, self.panels = word(ROWS), word(PANELS)
        self.weight, self.panel_bytes = word(WEIGHT), word(PANEL_BYTES)
        self.table, self.table_bytes, self.group = word(TABLE), word(TABLE_BYTES), word(GROUP)
        self.x, self.x_bytes, self.depth = word(X), word(X_BYTES), word(DEPTH)
        self.tile, self.prefetch, self.further = word(TILE), word(PREFETCH), word(FURTHER)


def _emit_tiles(builder: Any, storage: WeightFormat, rows: int, at_once: int, o: _Operands) -> None:
    """All the panels: as many at once as fit, then one by one."""
    done = _I64(0)
    for width in (at_once, 1) if at_once > 1 else (1,):
        count = builder.sdiv(builder.sub(o.panels, done), _I64(width))
        tile = _Tile(builder, storage, rows, width, o)
        begun = done

        def one(
            index: Any, _: list[Any], tile: _Tile = tile, begun: Any = begun, width: int = width
        ) -> list[Any]:
            panel = builder.add(begun, builder.mul(index, _I64(width)))
            weight = builder.add(o.weight, builder.mul(panel, o.panel_bytes))
            is_first = builder.icmp_signed("==", panel, _I64(0))
            tile.emit(
                weight,
                builder.add(o.table, builder.mul(panel, o.table_bytes)),
                builder.add(o.tile, builder.mul(panel, _I64(PANEL * 4))),
                builder.select(is_first, o.prefetch, weight),  # the others' lines are on their way
            )
            return []

        counted(builder, count, [], one)
        done = builder.mul(count, _I64(width))


def _emit_rows(builder: Any, storage: WeightFormat, processor: tuple[str, str], operands: _Operands) -> None:
    """One piece of code for each number of rows, and the choice between them."""
    after = builder.append_basic_block("done")
    choice = builder.switch(operands.rows, after)
    for count in range(1, MAX_ROWS + 1):
        block = builder.append_basic_block(f"rows{count}")
        choice.add_case(_I64(count), block)
        builder.position_at_end(block)
        _emit_tiles(builder, storage, count, panels_at_once(count, *processor), operands)
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply_rows(typing: Any, storage: Any, call: Any) -> Any:
    """``_multiply_rows(storage, call)``; the storage is a constant."""
    number = storage.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        triple, _, features = context.codegen().magic_tuple()
        _emit_rows(builder, FORMATS[number], (triple, features), _Operands(builder, arguments[1]))
        return context.get_dummy_value()

    return types.void(storage, types.int64), generate


@kernel(fastmath=False)
def _multiply_float32(call: int) -> int:
    _multiply_rows(FLOAT32, call)
    return 0


@kernel(fastmath=False)
def _multiply_bfloat16(call: int) -> int:
    _multiply_rows(BFLOAT16, call)
    return 0


@kernel(fastmath=False)
def _multiply_int8(call: int) -> int:
    _multiply_rows(INT8, call)
    return 0


@kernel(fastmath=False)
def _multiply_int4(call: int) -> int:
    _multiply_rows(INT4, call)
    return 0


def multiply_address(storage: int) -> int:
    """The machine address of a storage's microkernel, for :func:`multiply`; compiles it if need be.

    Kernels call it by its address, so that each microkernel is compiled once, and only where it is used,
    instead of into every kernel that multiplies.
    """
    microkernels: tuple[Any, ...] = (_multiply_float32, _multiply_bfloat16, _multiply_int8, _multiply_int4)
    microkernel = microkernels[storage]
    signature = (types.int64,)
    microkernel.compile(signature)
    result = microkernel.overloads[signature]
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


@intrinsic  # type: ignore[untyped-decorator]
def multiply(typing: Any, address: Any, call: Any) -> Any:
    """``multiply(address, call)``: add ``x @ weight`` to a tile of float32, for a few rows and panels.

    ``address`` is that of the storage's microkernel (:func:`multiply_address`), ``call`` that of int64 words:

    - ROWS: 1 to 6. PANELS: 1 to 4.
    - WEIGHT: address of the first panel, [depth, 16] in its storage; PANEL_BYTES: from one to the next.
      int8 weights are multiplied as they are, without their columns' scales.
    - TABLE, TABLE_BYTES, GROUP: int4 only: address of the first panel's scales and offsets, bytes from one
      panel's to the next's, and k per group, a multiple of 8.
    - X: address of the first row, [depth] float32; X_BYTES: from one to the next.
    - DEPTH: k to sum over; where a product is cut, a multiple of the group.
    - TILE: address of [rows, 64] float32.
    - PREFETCH: address of a panel that will be read soon: as many weights of it and the next one as of each
      of the panels multiplied are asked for meanwhile, and of the two that lie FURTHER bytes behind.
    """

    def emit(builder: Any, a: Any) -> None:
        function = builder.inttoptr(a[0], ir.FunctionType(_I64, [_I64]).as_pointer())
        builder.call(function, [a[1]])

    return instruction(types.void(types.int64, types.int64), emit)
