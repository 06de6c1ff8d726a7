"""Sums of parts are torch's, in rank order, to the bit."""

from __future__ import annotations

import numpy
import pytest
import torch

from shoal.comm.shm_sums import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT32, INT64, item_bytes, sum_parts

KINDS = {
    torch.float32: FLOAT32,
    torch.float64: FLOAT64,
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
    torch.int32: INT32,
    torch.int64: INT64,
}


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, in float32 where that is wider, rounded once."""
    wide = parts.float() if parts.dtype in (torch.bfloat16, torch.float16) else parts
    total = wide[0].clone()
    for part in wide[1:]:
        total = total + part
    return total.to(parts.dtype)


def summed(parts: torch.Tensor) -> torch.Tensor:
    """By the kernel; what lies beyond the sum must stay."""
    count = parts.shape[1]
    out = torch.full((count + 1,), 77).to(parts.dtype)
    kind = KINDS[parts.dtype]
    sum_parts(kind, out.data_ptr(), parts.data_ptr(), count * parts.itemsize, len(parts), count)
    assert out[-1] == 77
    return out[:-1]


@pytest.mark.parametrize("count", [1, 7, 1024, 3001])
@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_sums_equal_torchs_in_rank_order(dtype: torch.dtype, parts: int, count: int) -> None:
    torch.manual_seed(count)
    values = (torch.randn(parts, count, dtype=torch.float64) * 100).to(dtype)
    assert torch.equal(summed(values), in_order(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_infinities_nan_overflow_and_subnormals_are_kept(dtype: torch.dtype) -> None:
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    left = [torch.inf, torch.inf, -torch.inf, torch.nan, largest, smallest / 8, -smallest / 4, 0.0, -0.0]
    right = [1.0, -torch.inf, 3.0, 1.0, largest, smallest / 8, smallest / 8, smallest / 8, 0.0]
    values = torch.tensor([left, right], dtype=torch.float64).to(dtype)
    out, expected = summed(values), in_order(values)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(nan=5.0), expected.nan_to_num(nan=5.0))


def test_every_float16_and_every_bfloat16_survives_the_way_to_float32_and_back() -> None:
    bits = torch.from_numpy(numpy.arange(65536, dtype=numpy.uint16).view(numpy.int16))
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype)
        out = summed(torch.stack([values, torch.zeros_like(values)]))
        assert torch.equal(out.isnan(), values.isnan())
        assert torch.equal(out[~out.isnan()], values[~values.isnan()])


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_size_of_an_element_is_torchs(dtype: torch.dtype) -> None:
    assert item_bytes(KINDS[dtype]) == dtype.itemsize
