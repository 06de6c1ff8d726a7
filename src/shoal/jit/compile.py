"""The one way a kernel is compiled: numba, without the GIL, cached on disk. Knows no kernel.

Compilation happens at a kernel's first call with new argument types, never at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, overload

import numba

from shoal.jit.cache import KernelCache

__all__ = ["kernel"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Sums may be reordered, products and sums fused, divisions by a constant made products, and the sign of a
# zero is free. Not "nnan" and "ninf": masks are minus infinity, and a NaN must stay visible.
_FASTMATH = frozenset({"contract", "reassoc", "nsz", "arcp"})


@overload
def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]: ...


@overload
def kernel(
    *, inline: Literal["never", "always"] = "never", fastmath: bool | set[str] = True
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]: ...


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    inline: Literal["never", "always"] = "never",
    fastmath: bool | set[str] = True,
) -> Any:
    """Decorate a function that numba compiles: ``@kernel`` or ``@kernel(inline="always")``.

    Compiled kernels run without the GIL, check no bounds, divide like numpy (no exception), and raise
    nothing: they return a status where they can fail. Argument types are those of the first call; each new
    set is compiled once and kept on disk (:mod:`shoal.jit.cache`).

    Args:
        inline: "always" has LLVM put the body into every caller.
        fastmath: True: reassociation, contraction, reciprocals, no signed zeros; infinities and NaN keep
            their meaning. False: IEEE arithmetic in the order written. Or numba's own set of flag names.
    """

    def compile_lazily(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(
            nogil=True,
            error_model="numpy",
            boundscheck=False,
            forceinline=inline == "always",
            fastmath=set(_FASTMATH) if fastmath is True else fastmath,
        )(function)
        if dispatcher is not function:  # NUMBA_DISABLE_JIT hands the function back
            dispatcher._cache = KernelCache(function)
        return dispatcher

    if inline not in ("never", "always"):
        raise ValueError(f'inline: "never" or "always", got {inline!r}')
    return compile_lazily if function is None else compile_lazily(function)
