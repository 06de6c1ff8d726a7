"""Activations in place, and the products of gated layers. Knows no linear layer.

An activation is a number (:data:`ACTIVATIONS`), so that one compiled kernel serves all. Rows are computed 16
values at a time in float32; a value's result does not depend on where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from numba import types
from numba.extending import intrinsic

from shoal.cpu_kernels.arguments import argument, output, rows_of, run_job
from shoal.cpu_kernels.elementary import Vector, error_function, exponential, hyperbolic_tangent, sigmoid
from shoal.cpu_kernels.emit import PANEL, load_vector, store_vector
from shoal.cpu_kernels.memory import copy_panel, load_float32, multiply_panel, stack_floats, store_float32
from shoal.jit.compile import kernel
from shoal.jit.team import Team

__all__ = [
    "ACTIVATIONS",
    "activate",
    "activate_panels",
    "activation_job",
    "activation_number",
    "activation_part",
]

NONE, SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, SIGMOID, TANH = range(9)

# By name, as transformers' configs spell them.
ACTIVATIONS: Mapping[str, int] = MappingProxyType(
    {
        "linear": NONE,
        "silu": SILU,
        "swish": SILU,
        "gelu": GELU,
        "gelu_new": GELU_TANH,
        "gelu_fast": GELU_TANH,
        "gelu_pytorch_tanh": GELU_TANH,
        "quick_gelu": QUICK_GELU,
        "relu": RELU,
        "relu2": RELU2,
        "sigmoid": SIGMOID,
        "tanh": TANH,
    }
)

_PANEL_BYTES = 4 * PANEL


def _gelu_tanh(x: Vector) -> Vector:
    inner = (x * x * x).times_plus(0.044715, x) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (hyperbolic_tangent(inner) + 1.0)


def _relu(x: Vector) -> Vector:
    return x.where(x.below(0.0), 0.0)


_FORMULAS: Mapping[int, Callable[[Vector], Vector]] = MappingProxyType(
    {
        SILU: lambda x: x / (exponential(-x) + 1.0),
        GELU: lambda x: x * 0.5 * (error_function(x * math.sqrt(0.5)) + 1.0),
        GELU_TANH: _gelu_tanh,
        QUICK_GELU: lambda x: x * sigmoid(x * 1.702),
        RELU: _relu,
        RELU2: lambda x: _relu(x) * _relu(x),
        SIGMOID: sigmoid,
        TANH: hyperbolic_tangent,
    }
)


def activation_number(name: str) -> int:
    """The number of an activation.

    Raises:
        ValueError: none of ACTIVATIONS.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _activate_panel(typing: Any, activation: Any, address: Any) -> Any:
    """``_activate_panel(activation, address)``: 16 floats in place; the activation is a constant."""
    formula = _FORMULAS[activation.literal_value]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        result = formula(Vector(builder, load_vector(builder, values[1])))
        store_vector(builder, result.value, values[1])
        return context.get_dummy_value()

    return types.void(activation, types.int64), generate


@kernel(fastmath=False)
def activate_panels(activation: int, values: int, panels: int) -> None:
    """Apply an activation to 16 * ``panels`` floats at ``values``, in place."""
    for panel in range(panels):
        spot = values + panel * _PANEL_BYTES
        if activation == SILU:
            _activate_panel(SILU, spot)
        elif activation == GELU:
            _activate_panel(GELU, spot)
        elif activation == GELU_TANH:
            _activate_panel(GELU_TANH, spot)
        elif activation == QUICK_GELU:
            _activate_panel(QUICK_GELU, spot)
        elif activation == RELU:
            _activate_panel(RELU, spot)
        elif activation == RELU2:
            _activate_panel(RELU2, spot)
        elif activation == SIGMOID:
            _activate_panel(SIGMOID, spot)
        elif activation == TANH:
            _activate_panel(TANH, spot)


@kernel(fastmath=False)
def _activate_row(activation: int, source: int, factor: int, target: int, width: int) -> None:
    """target = activation(source) * factor over a row of floats; ``factor`` 0: no factor."""
    piece = stack_floats(PANEL)
    whole = width // PANEL
    for panel in range(whole):
        offset = panel * _PANEL_BYTES
        copy_panel(piece, source + offset)
        activate_panels(activation, piece, 1)
        if factor != 0:
            multiply_panel(piece, factor + offset)
        copy_panel(target + offset, piece)
    first = whole * PANEL
    if first == width:
        return
    for j in range(PANEL):
        store_float32(piece, j, load_float32(source, first + j) if first + j < width else 0.0)
    activate_panels(activation, piece, 1)
    for j in range(width - first):
        value = load_float32(piece, j)
        if factor != 0:
            value *= load_float32(factor, first + j)
        store_float32(target, first + j, value)


@kernel(fastmath=False)
def activation_part(
    index: int,
    count: int,
    activation: int,
    x: int,
    x_bytes: int,
    factor: int,
    factor_bytes: int,
    out: int,
    out_bytes: int,
    rows: int,
    width: int,
) -> None:
    """out = activation(x) * factor for participant ``index`` of ``count``.

    Args:
        x, factor, out: addresses of the first rows, [width] float32 each, with the bytes from row to row;
            ``out`` may be ``x`` or ``factor``. ``factor`` 0: no factor.
    """
    for row in range(rows * index // count, rows * (index + 1) // count):
        row_factor = factor + row * factor_bytes if factor != 0 else 0
        _activate_row(activation, x + row * x_bytes, row_factor, out + row * out_bytes, width)


@kernel(fastmath=False)
def activation_job(index: int, count: int, words: int) -> int:
    """:func:`activation_part` as a job; its words: rows, activation, x, x_bytes, factor, factor_bytes, out,
    out_bytes, width."""
    activation_part(
        index,
        count,
        argument(words, 1),
        argument(words, 2),
        argument(words, 3),
        argument(words, 4),
        argument(words, 5),
        argument(words, 6),
        argument(words, 7),
        argument(words, 0),
        argument(words, 8),
    )
    return 0


def activate(
    x: torch.Tensor,
    activation: str,
    team: Team,
    factor: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(x) * factor.

    Args:
        x: [..., W] float32.
        activation: a name of ACTIVATIONS.
        factor: [..., W] float32: a gated layer's second half, which may be a view of the same buffer.
        out: [M, W] float32 to write into, M being the rows of ``x``; may be ``x`` or ``factor``.

    Returns:
        [..., W], or ``out`` as it was given.

    Raises:
        TypeError, ValueError: an unknown activation, dtypes and shapes that do not fit.
    """
    number = activation_number(activation)
    width = x.shape[-1]
    rows = rows_of(x, width, "x")
    factors = None if factor is None else rows_of(factor, width, "factor")
    if factors is not None and factors.shape != rows.shape:
        raise ValueError(f"factor: {list(rows.shape)}, got {list(factors.shape)}")
    target = output(out, rows.shape[0], width)
    run_job(
        team,
        activation_job,
        rows.shape[0],
        number,
        rows.data_ptr(),
        4 * rows.stride(0),
        0 if factors is None else factors.data_ptr(),
        0 if factors is None else 4 * factors.stride(0),
        target.data_ptr(),
        4 * target.stride(0),
        width,
    )
    return target if out is not None else target.view(x.shape)
