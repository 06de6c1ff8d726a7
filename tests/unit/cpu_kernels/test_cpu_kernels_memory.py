"""Loads and stores by address."""

from __future__ import annotations

import torch

from shoal.cpu_kernels.memory import (
    add_panel,
    add_panels,
    copy_panel,
    load_bfloat16,
    load_float32,
    load_float64,
    load_int64,
    load_uint8,
    multiply_panel,
    stack_floats,
    store_bfloat16,
    store_float32,
    store_int64,
)
from shoal.jit.compile import kernel


@kernel(fastmath=False)
def _widen(source: int, target: int, count: int) -> None:
    for i in range(count):
        store_float32(target, i, load_bfloat16(source, i))


@kernel(fastmath=False)
def _narrow(source: int, target: int, count: int) -> None:
    for i in range(count):
        store_bfloat16(target, i, load_float32(source, i))


@kernel(fastmath=False)
def _combine(first: int, second: int, out: int) -> None:
    copy_panel(out, first)
    add_panel(out, second)
    multiply_panel(out, second)
    add_panels(out, out, first)


@kernel(fastmath=False)
def _others(words: int, doubles: int, bytes_: int, out: int) -> None:
    store_int64(out, 0, load_int64(words, 1))
    store_int64(out, 1, int(load_float64(doubles, 1)))
    store_int64(out, 2, load_uint8(bytes_, 1))


_SOME = 100


@kernel(fastmath=False)
def _aligned(out: int) -> int:
    spot = stack_floats(_SOME)
    for i in range(_SOME):
        store_float32(spot, i, load_float32(out, i))
    for i in range(_SOME):
        store_float32(out, i, load_float32(spot, _SOME - 1 - i))
    return spot % 64


def test_every_bfloat16_widens_to_its_float32() -> None:
    halves = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    wide = torch.empty(2**16)
    _widen(halves.data_ptr(), wide.data_ptr(), 2**16)
    assert torch.equal(wide.view(torch.int32), halves.float().view(torch.int32))


def test_float32_narrows_to_bfloat16_as_torch_rounds() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32)
    values = torch.cat(
        [bits.view(torch.float32), torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])]
    )
    halves = torch.empty(values.shape, dtype=torch.bfloat16)
    _narrow(values.data_ptr(), halves.data_ptr(), values.numel())
    expected = values.bfloat16()
    assert torch.equal(halves.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(halves[kept].view(torch.int16), expected[kept].view(torch.int16))


def test_panels_are_copied_added_and_multiplied() -> None:
    first, second, out = torch.randn(16), torch.randn(16), torch.empty(16)
    _combine(first.data_ptr(), second.data_ptr(), out.data_ptr())
    assert torch.equal(out, (first + second) * second + first)


def test_words_doubles_and_bytes_are_read_where_they_are() -> None:
    words, doubles = torch.tensor([1, -(2**60)]), torch.tensor([0.5, 2.0**53]).double()
    numbers, out = torch.tensor([0, 255, 0], dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    _others(words.data_ptr(), doubles.data_ptr(), numbers.data_ptr(), out.data_ptr())
    assert out.tolist() == [-(2**60), 2**53, 255]


def test_stack_memory_is_aligned_and_holds_what_is_put_there() -> None:
    values = torch.randn(_SOME)
    expected = values.flip(0)
    assert _aligned(values.data_ptr()) == 0
    assert torch.equal(values, expected)
