"""RMSNorm and LayerNorm over rows, with the residual sum before them. Knows no model.

``total = x + added``, then ``out = (total - mean) * rsqrt(variance + eps) * weight + bias`` (LayerNorm; the
variance is the biased one) or ``out = total * rsqrt(mean of squares + eps) * weight`` (RMSNorm). A norm that
multiplies by 1 + weight, as gemma's, is given that sum as its weight. Moments are summed in float64.
"""

from __future__ import annotations

import numpy
import torch

from shoal.cpu_kernels.arguments import argument, argument_float, float_bits, output, rows_of, run_job
from shoal.cpu_kernels.memory import load_float32, store_float32
from shoal.jit.compile import kernel
from shoal.jit.team import Team

__all__ = ["Norm", "head_norm_job", "head_norm_part", "norm_job", "norm_part", "norm_row"]


@kernel
def _moments(x: int, width: int, is_centred: int, eps: float) -> tuple[float, float]:
    """A row's mean (0 if not centred), and 1 / sqrt(variance + eps)."""
    mean = 0.0
    if is_centred != 0:
        for i in range(width):
            mean += load_float32(x, i)
        mean /= width
    squares = 0.0
    for i in range(width):
        away = load_float32(x, i) - mean
        squares += away * away
    return mean, 1.0 / numpy.sqrt(squares / width + eps)


@kernel(fastmath=False)
def norm_row(x: int, width: int, weight: int, bias: int, is_centred: int, eps: float, out: int) -> None:
    """One row; see :func:`norm_part`."""
    wide_mean, wide_factor = _moments(x, width, is_centred, eps)
    mean, factor = numpy.float32(wide_mean), numpy.float32(wide_factor)
    if weight == 0:
        for i in range(width):
            store_float32(out, i, (load_float32(x, i) - mean) * factor)
    elif bias == 0:
        for i in range(width):
            store_float32(out, i, (load_float32(x, i) - mean) * factor * load_float32(weight, i))
    else:
        for i in range(width):
            scaled = (load_float32(x, i) - mean) * factor * load_float32(weight, i)
            store_float32(out, i, scaled + load_float32(bias, i))


@kernel(fastmath=False)
def norm_part(
    index: int,
    count: int,
    x: int,
    x_bytes: int,
    rows: int,
    width: int,
    added: int,
    added_bytes: int,
    total: int,
    total_bytes: int,
    weight: int,
    bias: int,
    is_centred: int,
    eps: float,
    out: int,
    out_bytes: int,
) -> None:
    """out = norm(x + added), the rows of participant ``index`` of ``count``.

    Args:
        x: address of the first row, [width] float32, ``x_bytes`` from one to the next.
        added: likewise; 0: nothing is added, and ``total`` is not written.
        total: likewise, for x + added; may be ``x`` or ``added``.
        weight, bias: addresses of [width] float32, or 0; a bias only with a weight.
        is_centred: 1 for LayerNorm, 0 for RMSNorm.
        out: as ``x``; may be ``x`` or ``total``.
    """
    for row in range(rows * index // count, rows * (index + 1) // count):
        source = x + row * x_bytes
        if added != 0:
            other, sums = added + row * added_bytes, total + row * total_bytes
            for i in range(width):
                store_float32(sums, i, load_float32(source, i) + load_float32(other, i))
            source = sums
        norm_row(source, width, weight, bias, is_centred, eps, out + row * out_bytes)


@kernel(fastmath=False)
def head_norm_part(
    index: int,
    count: int,
    x: int,
    x_bytes: int,
    rows: int,
    heads: int,
    width: int,
    weight: int,
    bias: int,
    is_centred: int,
    eps: float,
) -> None:
    """Norm each of the ``heads`` neighbouring heads [width] of each row in place; see :func:`norm_part`."""
    total = rows * heads
    for item in range(total * index // count, total * (index + 1) // count):
        spot = x + item // heads * x_bytes + item % heads * width * 4
        norm_row(spot, width, weight, bias, is_centred, eps, spot)


@kernel(fastmath=False)
def norm_job(index: int, count: int, words: int) -> int:
    """:func:`norm_part` as a job; its words: rows, x, x_bytes, width, added, added_bytes, total, total_bytes,
    weight, bias, is_centred, eps (float), out, out_bytes."""
    norm_part(
        index,
        count,
        argument(words, 1),
        argument(words, 2),
        argument(words, 0),
        argument(words, 3),
        argument(words, 4),
        argument(words, 5),
        argument(words, 6),
        argument(words, 7),
        argument(words, 8),
        argument(words, 9),
        argument(words, 10),
        argument_float(words, 11),
        argument(words, 12),
        argument(words, 13),
    )
    return 0


@kernel(fastmath=False)
def head_norm_job(index: int, count: int, words: int) -> int:
    """:func:`head_norm_part` as a job; its words: rows, x, x_bytes, heads, width,
    weight, bias, is_centred, eps (float)."""
    head_norm_part(
        index,
        count,
        argument(words, 1),
        argument(words, 2),
        argument(words, 0),
        argument(words, 3),
        argument(words, 4),
        argument(words, 5),
        argument(words, 6),
        argument(words, 7),
        argument_float(words, 8),
    )
    return 0


class Norm:
    """A norm over the last dimension, computed by a team of threads.

    Args:
        width: W.
        weight: [W] of any floating dtype, or None; kept as float32.
        bias: likewise; only with a weight.
        is_centred: True for LayerNorm, False for RMSNorm.
        adds_one: multiply by 1 + weight.

    Raises:
        ValueError: a weight or bias of another shape, or a bias without weight.
    """

    def __init__(
        self,
        width: int,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        team: Team,
        *,
        is_centred: bool,
        adds_one: bool = False,
    ) -> None:
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and tensor.shape != (width,):
                raise ValueError(f"{name}: [{width}], got {list(tensor.shape)}")
        if weight is None and (bias is not None or adds_one):
            raise ValueError("a bias, or 1 to add, but no weight")
        self.width = width
        self.weight = None if weight is None else weight.detach().float().contiguous()
        if adds_one and self.weight is not None:
            self.weight = self.weight + 1.0
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.eps = eps
        self.is_centred = is_centred
        self._team = team

    def __call__(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None = None,
        total: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """norm(x + added).

        Args:
            x: [..., W] float32.
            added: [..., W] float32, or None.
            total: [M, W] float32, M being the rows of ``x``, gets x + added; only with ``added``, and needed
                then; may be ``x`` or ``added``.
            out: [M, W] float32 to write into; may be ``x``.

        Returns:
            [..., W], or ``out`` as it was given.

        Raises:
            TypeError, ValueError: dtypes and shapes that do not fit.
        """
        rows = rows_of(x, self.width, "x")
        count = rows.shape[0]
        if (added is None) != (total is None):
            raise ValueError("added and total: both or neither")
        others = None if added is None else rows_of(added, self.width, "added")
        sums = None if total is None else output(total, count, self.width)
        if others is not None and others.shape[0] != count:
            raise ValueError(f"added: {count} rows, got {others.shape[0]}")
        target = output(out, count, self.width)
        run_job(
            self._team,
            norm_job,
            count,
            rows.data_ptr(),
            4 * rows.stride(0),
            self.width,
            *_place(others),
            *_place(sums),
            _place(self.weight)[0],
            _place(self.bias)[0],
            int(self.is_centred),
            float_bits(self.eps),
            *_place(target),
        )
        return target if out is not None else target.view(x.shape)


def _place(tensor: torch.Tensor | None) -> tuple[int, int]:
    """The address, and the bytes from row to row; zeros for None."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), 4 * tensor.stride(0))
