"""Elementary functions on vectors of 16 floats, as emitters of LLVM IR. Knows no memory and no kernel.

Plain IEEE arithmetic in the order written (fused where the processor can), the same in every lane: a value
does not depend on where it stands. NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from shoal.cpu_kernels.emit import FLOATS, PANEL, WORDS, fuse

__all__ = ["Vector", "error_function", "exponential", "hyperbolic_tangent", "sigmoid"]

_SIGN = 0x80000000

_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits

# Cephes expf: exp(r) = 1 + r + r^2 P(r) for |r| <= ln(2)/2.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Cephes tanhf: tanh(x) = x + x^3 P(x^2) for |x| < 0.625.
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
# Eigen's erf: x P(x^2) / Q(x^2) for |x| <= 4, beyond which the float is 1.
_ERF_TOP = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_BOTTOM = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


class Vector:
    """16 floats in registers, with the operators of floats. Numbers stand for vectors of themselves."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def __add__(self, other: Vector | float) -> Vector:
        return self._new(self.builder.fadd(self.value, self._value(other)))

    def __sub__(self, other: Vector | float) -> Vector:
        return self._new(self.builder.fsub(self.value, self._value(other)))

    def __mul__(self, other: Vector | float) -> Vector:
        return self._new(self.builder.fmul(self.value, self._value(other)))

    def __truediv__(self, other: Vector | float) -> Vector:
        return self._new(self.builder.fdiv(self.value, self._value(other)))

    def __neg__(self) -> Vector:
        return self._new(self.builder.fneg(self.value))

    def times_plus(self, factor: Vector | float, addend: Vector | float) -> Vector:
        """self * factor + addend, rounded once where the processor can."""
        return self._new(fuse(self.builder, self.value, self._value(factor), self._value(addend)))

    def below(self, other: Vector | float) -> Any:
        """Lanes that are less than ``other``; NaN is not."""
        return self.builder.fcmp_ordered("<", self.value, self._value(other))

    def where(self, lanes: Any, other: Vector | float) -> Vector:
        """``other`` in these lanes, itself elsewhere."""
        return self._new(self.builder.select(lanes, self._value(other), self.value))

    def clamped(self, least: float, most: float) -> Vector:
        """Itself between the bounds; NaN stays NaN."""
        low = self.where(self.below(least), least)
        return low.where(low.constant(most).below(low), most)

    def absolute(self) -> Vector:
        return self._from_bits(self.builder.and_(self.bits(), _words(_SIGN - 1)))

    def with_sign_of(self, other: Vector) -> Vector:
        """Itself, not negative, with the other's sign."""
        sign = self.builder.and_(other.bits(), _words(_SIGN))
        return self._from_bits(self.builder.or_(self.bits(), sign))

    def polynomial(self, coefficients: Sequence[float]) -> Vector:
        """The polynomial in itself, highest power first, by Horner's rule."""
        result = self.constant(coefficients[0])
        for coefficient in coefficients[1:]:
            result = result.times_plus(self, coefficient)
        return result

    def bits(self) -> Any:
        return self.builder.bitcast(self.value, WORDS)

    def constant(self, number: float) -> Vector:
        return self._new(self._value(number))

    def power_of_two(self, exponents: Any) -> Vector:
        """2 to the power of integers from -126 to 127."""
        biased = self.builder.add(exponents, _words(127))
        return self._from_bits(self.builder.shl(biased, _words(23)))

    def _from_bits(self, bits: Any) -> Vector:
        return self._new(self.builder.bitcast(bits, FLOATS))

    def _new(self, value: Any) -> Vector:
        return Vector(self.builder, value)

    def _value(self, other: Vector | float) -> Any:
        return other.value if isinstance(other, Vector) else ir.Constant(FLOATS, [other] * PANEL)


def _words(number: int) -> Any:
    return ir.Constant(WORDS, [number] * PANEL)


def exponential(x: Vector) -> Vector:
    """e to the x, within 2 units in the last place, infinity and denormals included."""
    b = x.builder
    x = x.clamped(-104.0, 89.0)  # beyond, the float is 0 or infinity
    shifted = x.times_plus(_LOG2_E, _ROUNDER)
    whole = shifted - _ROUNDER
    exponents = b.sub(shifted.bits(), x.constant(_ROUNDER).bits())
    rest = whole.times_plus(-_LN2_HIGH, x)
    rest = whole.times_plus(-_LN2_LOW, rest)
    result = (rest * rest).times_plus(rest.polynomial(_EXP), rest) + 1.0
    half = b.ashr(exponents, _words(1))  # in two factors: 2^128 and 2^-149 are no floats' exponents
    return result * x.power_of_two(half) * x.power_of_two(b.sub(exponents, half))


def sigmoid(x: Vector) -> Vector:
    """1 / (1 + e^-x)."""
    return x.constant(1.0) / (exponential(-x) + 1.0)


def hyperbolic_tangent(x: Vector) -> Vector:
    """tanh, with the relative error of a float near 0 too."""
    square = x * x
    small = (square * x).times_plus(square.polynomial(_TANH), x)
    size = x.absolute()
    large = x.constant(1.0) - x.constant(2.0) / (exponential(size * 2.0) + 1.0)
    return large.with_sign_of(x).where(size.below(0.625), small)


def error_function(x: Vector) -> Vector:
    """erf, within 5e-7."""
    bounded = x.clamped(-4.0, 4.0)
    square = bounded * bounded
    return bounded * square.polynomial(_ERF_TOP) / square.polynomial(_ERF_BOTTOM)
