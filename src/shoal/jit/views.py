"""Memory at an address as a typed array, and copies of bytes, for kernels. Knows not what lies there."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from shoal.jit.compile import kernel

__all__ = ["array_at", "copy_bytes"]


@intrinsic  # type: ignore[untyped-decorator]
def _pointer_to(typing: Any, address: Any, dtype: Any) -> Any:
    """``_pointer_to(address, numpy.float32)``: the address as a typed pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), generate


@kernel(inline="always")
def array_at(address: int, count: int, dtype: Any) -> Any:
    """``count`` elements of ``dtype`` (a numpy type, written out in the kernel) that lie at ``address``."""
    return carray(_pointer_to(address, dtype), (count,))


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """``copy_bytes(target, source, num_bytes)`` between addresses that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(argument, byte) for argument in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
