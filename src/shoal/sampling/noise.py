"""Sampling noise as a pure function of (seed, branch, position, token id). Knows no logits.

The noise of a token does not depend on the batch, the row order, the number of ranks or threads, or
on which other tokens are asked for: a replayed request draws what it drew before, and a filtered
vocabulary draws what the full one would. Integers are mixed bit for bit alike on every device; only
the final logarithm may differ in its last bit.

Two mixers: splitmix64's finaliser (Steele, Lea, Flood 2014, variant 13 of Stafford) turns seed,
branch and position into a 64-bit key in plain Python; the 32-bit finaliser ``triple32`` (Wellons,
"Prospecting for Hash Functions", bias 0.021) mixes key and token id on the tensor's device. One half
of the key enters before it and one half after its first multiplication.
"""

from __future__ import annotations

import torch

__all__ = ["exponential", "row_key"]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1
_MASK_31 = (1 << 31) - 1
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 under 1


def _mix64(value: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _signed32(value: int) -> int:
    """The low 32 bits as a two's complement integer."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def row_key(seed: int, branch: int, position: int) -> tuple[int, int]:
    """The 64-bit key of one sampled token, as two signed 32-bit halves.

    Args:
        seed: any 64-bit integer, signed or unsigned.
        branch: index among the branches of ``n > 1``.
        position: absolute position of the token that is sampled.
    """
    state = 0
    for word in (seed, branch, position):
        state = _mix64(((state ^ (word & _MASK_64)) + _GOLDEN) & _MASK_64)
    return _signed32(state >> 32), _signed32(state)


def _xor_shifted(value: torch.Tensor, shift: int, scratch: torch.Tensor) -> None:
    """``value ^= value >>> shift`` in place; torch's own right shift copies the sign bit."""
    torch.bitwise_right_shift(value, shift, out=scratch)
    value.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _mix32(first: torch.Tensor, second: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """triple32 of ``ids + first``, with ``second`` added on the way; int32, wrapping."""
    value = ids + first
    scratch = torch.empty_like(value)
    _xor_shifted(value, 17, scratch)
    value.mul_(_signed32(0xED5AD4BB)).add_(second)
    _xor_shifted(value, 11, scratch)
    value.mul_(_signed32(0xAC4C1B51))
    _xor_shifted(value, 15, scratch)
    value.mul_(_signed32(0x31848BAB))
    _xor_shifted(value, 14, scratch)
    return value


def exponential(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Exponential(1) noise; ``argmax(probability / noise)`` is a draw from the probabilities.

    That is the Gumbel-max trick without its outer logarithm: ``log(p / noise) = log p + gumbel``.
    The uniform behind it has 31 bits and is spaced evenly down to 2**-32, so the noise is exact
    where it decides, near zero; a token less likely than about 1e-10 is never drawn.

    Args:
        keys: int32 [rows, 2], halves of :func:`row_key`.
        ids: int32 [n], the same tokens for every row, or [rows, n].

    Returns:
        float32 [rows, n], each above 0 and at most 16.7.
    """
    mixed = _mix32(keys[:, :1], keys[:, 1:], ids).bitwise_and_(_MASK_31)
    uniform = mixed.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_()
