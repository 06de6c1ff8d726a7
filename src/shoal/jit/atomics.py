"""Atomic memory operations by address, for kernels. Knows no protocol.

Every address is that of an aligned int64 (the futex looks at its low half). The orders are LLVM's, so they
hold on weakly ordered processors too: what was written before ``store_release`` or ``fetch_add`` is seen by
whoever reads the new value with ``load_acquire``.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = [
    "compare_exchange",
    "fence",
    "fetch_add",
    "futex_wait",
    "futex_wake",
    "load_acquire",
    "now_ns",
    "relax",
    "store_release",
    "yield_cpu",
]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_WORD_BYTES = 8
_NANOSECONDS = 1_000_000_000

# Numbers of the futex call; elsewhere sleepers poll.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_POLL_NS = 100_000

_Emit = Callable[[ir.IRBuilder, Any], Any]


def _instruction(result: Any, emit: _Emit) -> tuple[Any, Any]:
    """What an intrinsic returns: its signature, built by the caller, and the code emitter."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = emit(builder, arguments)
        return context.get_dummy_value() if value is None else value

    return result, generate


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def load_acquire(typing: Any, address: Any) -> Any:
    """``load_acquire(address) -> int64``"""
    return _instruction(
        types.int64(types.int64),
        lambda builder, a: builder.load_atomic(_pointer(builder, a[0]), "acquire", _WORD_BYTES),
    )


@intrinsic  # type: ignore[untyped-decorator]
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """``store_release(address, value)``"""

    def emit(builder: Any, a: Any) -> None:
        builder.store_atomic(a[1], _pointer(builder, a[0]), "release", _WORD_BYTES)

    return _instruction(types.void(types.int64, types.int64), emit)


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """``fetch_add(address, value) -> int64``: the value before."""
    return _instruction(
        types.int64(types.int64, types.int64),
        lambda builder, a: builder.atomic_rmw("add", _pointer(builder, a[0]), a[1], "seq_cst"),
    )


@intrinsic  # type: ignore[untyped-decorator]
def compare_exchange(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """``compare_exchange(address, expected, value) -> int64``: the value before; equal means exchanged."""

    def emit(builder: Any, a: Any) -> Any:
        both = builder.cmpxchg(_pointer(builder, a[0]), a[1], a[2], "seq_cst", "seq_cst")
        return builder.extract_value(both, 0)

    return _instruction(types.int64(types.int64, types.int64, types.int64), emit)


@intrinsic  # type: ignore[untyped-decorator]
def fence(typing: Any) -> Any:
    """``fence()``: no access moves across it, a later load before an earlier store neither."""

    def emit(builder: Any, a: Any) -> None:
        builder.fence("seq_cst")

    return _instruction(types.void(), emit)


@intrinsic  # type: ignore[untyped-decorator]
def relax(typing: Any) -> Any:
    """``relax()``: tells the processor that this is a spin loop."""

    def emit(builder: Any, a: Any) -> None:
        machine = platform.machine()
        if machine in ("x86_64", "AMD64"):
            builder.call(_declared(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif machine in ("aarch64", "arm64"):
            # "isb" pauses for some tens of cycles, as x86's "pause" does; "yield" is a no-op on most cores
            builder.asm(ir.FunctionType(ir.VoidType(), []), "isb", "", [], True)

    return _instruction(types.void(), emit)


@intrinsic  # type: ignore[untyped-decorator]
def now_ns(typing: Any) -> Any:
    """``now_ns() -> int64``: nanoseconds on the monotonic clock, the one of ``time.monotonic_ns()``."""

    def emit(builder: Any, a: Any) -> Any:
        spot = _alloca(builder, ir.ArrayType(_I64, 2))
        pointer = builder.gep(spot, [_I32(0), _I32(0)])
        read = _declared(builder, "clock_gettime", _I32, [_I32, _I64.as_pointer()])
        builder.call(read, [_I32(time.CLOCK_MONOTONIC), pointer])
        seconds, rest = builder.load(pointer), builder.load(builder.gep(pointer, [_I32(1)]))
        return builder.add(builder.mul(seconds, _I64(_NANOSECONDS)), rest)

    return _instruction(types.int64(), emit)


@intrinsic  # type: ignore[untyped-decorator]
def yield_cpu(typing: Any) -> Any:
    """``yield_cpu()``: let another thread run on this core."""

    def emit(builder: Any, a: Any) -> None:
        builder.call(_declared(builder, "sched_yield", _I32, []), [])

    return _instruction(types.void(), emit)


@intrinsic  # type: ignore[untyped-decorator]
def futex_wait(typing: Any, address: Any, expected: Any, timeout_ns: Any) -> Any:
    """``futex_wait(address, expected, timeout_ns)``: sleep while the word has this value, or until woken.

    May return early. Words in shared memory wake other processes too. Without futexes (not Linux) it sleeps
    a tenth of a millisecond at most.
    """

    def emit(builder: Any, a: Any) -> None:
        spot = _alloca(builder, ir.ArrayType(_I64, 2))
        pointer = builder.gep(spot, [_I32(0), _I32(0)])
        length = a[2]
        if _FUTEX is None:
            poll = _I64(_POLL_NS)
            length = builder.select(builder.icmp_signed("<", length, poll), length, poll)
        builder.store(builder.sdiv(length, _I64(_NANOSECONDS)), pointer)
        builder.store(builder.srem(length, _I64(_NANOSECONDS)), builder.gep(pointer, [_I32(1)]))
        timeout = builder.ptrtoint(pointer, _I64)
        if _FUTEX is None:
            builder.call(_declared(builder, "nanosleep", _I32, [_I64, _I64]), [timeout, _I64(0)])
        else:
            low = builder.and_(a[1], _I64(0xFFFFFFFF))
            _system_call(builder, [_I64(_FUTEX), a[0], _I64(_FUTEX_WAIT), low, timeout])

    return _instruction(types.void(types.int64, types.int64, types.int64), emit)


@intrinsic  # type: ignore[untyped-decorator]
def futex_wake(typing: Any, address: Any) -> Any:
    """``futex_wake(address)``: wake everybody who sleeps on this word."""

    def emit(builder: Any, a: Any) -> None:
        if _FUTEX is not None:
            _system_call(builder, [_I64(_FUTEX), a[0], _I64(_FUTEX_WAKE), _I64(2**31 - 1), _I64(0)])

    return _instruction(types.void(types.int64), emit)


def _system_call(builder: Any, arguments: list[Any]) -> None:
    padded = [*arguments, *[_I64(0)] * (7 - len(arguments))]
    builder.call(_declared(builder, "syscall", _I64, [_I64], is_variadic=True), padded)


def _declared(builder: Any, name: str, result: Any, arguments: list[Any], is_variadic: bool = False) -> Any:
    """A function of the C library, or LLVM's own, by name: code that holds no pointer can be kept on disk."""
    known = builder.module.globals.get(name)
    signature = ir.FunctionType(result, arguments, var_arg=is_variadic)
    return known or ir.Function(builder.module, signature, name=name)


def _alloca(builder: Any, kind: Any) -> Any:
    """Stack space of the function, once, however often a loop comes by."""
    with builder.goto_entry_block():
        return builder.alloca(kind)
