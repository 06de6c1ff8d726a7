"""The product in registers: every shape of it, and that a sum does not depend on how it is cut."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch

from shoal.cpu_kernels.layout import STORAGES, PackedWeight, pack, unpack
from shoal.cpu_kernels.microkernel import CALL_WORDS, multiply, multiply_address, panels_at_once
from shoal.jit.compile import kernel


@kernel(fastmath=False)
def _multiply(address: int, call: int) -> None:
    multiply(address, call)


def product(
    packed: PackedWeight, x: torch.Tensor, panels: range, tile: torch.Tensor, first: int = 0, last: int = 0
) -> None:
    """tile += x @ these panels, over k from ``first`` to ``last``, which are even; 0: to the end."""
    last = last or packed.depth
    by_pair = 16 if packed.table is not None else 32 * packed.data.element_size()
    table, table_bytes = 0, 0
    if packed.table is not None:
        table_bytes = packed.table[0].nbytes
        table = packed.table.data_ptr() + panels[0] * table_bytes + first // packed.group * 64
    start = packed.data[panels[0]].data_ptr() + first // 2 * by_pair
    words = numpy.array(
        [
            *(x.shape[0], len(panels), start, packed.data[0].nbytes, table, table_bytes, packed.group),
            *(x[:, first:].data_ptr(), 4 * x.stride(0), last - first, tile.data_ptr(), start, 0),
        ],
        numpy.int64,
    )
    assert words.size == CALL_WORDS
    _multiply(multiply_address(packed.storage), int(words.ctypes.data))


def sums(packed: PackedWeight, weight: torch.Tensor) -> torch.Tensor:
    """An unpacked weight as the microkernel sees it: without the scales of int8."""
    return weight if packed.scales is None else weight / packed.scales[: packed.columns, None]


@pytest.mark.parametrize("storage", STORAGES)
def test_every_number_of_rows_and_panels_equals_torch(storage: str) -> None:
    for depth in (1, 2, 7, 31, 33, 64, 100):
        packed = pack(torch.randn(80, depth), storage=storage)
        weight = sums(packed, unpack(packed)).double()
        for rows, first, count in itertools.product(range(1, 7), (0, 1), range(1, 5)):
            x, tile = torch.randn(rows, depth), torch.randn(rows, 64)
            expected = tile.double()
            expected[:, : 16 * count] += x.double() @ weight[16 * first : 16 * (first + count)].T
            product(packed, x, range(first, first + count), tile)
            torch.testing.assert_close(
                tile.double(), expected, atol=3e-6 * weight.abs().max().item(), rtol=1e-5
            )


@pytest.mark.parametrize("storage", STORAGES)
def test_a_sum_has_the_same_bits_however_depth_is_cut(storage: str) -> None:
    packed = pack(torch.randn(64, 226), storage=storage)
    x = torch.randn(6, 226)
    whole, cut = torch.zeros(6, 64), torch.zeros(6, 64)
    product(packed, x, range(4), whole)
    for first, last in ((0, 64), (64, 96), (96, 192), (192, 226)):
        product(packed, x, range(4), cut, first, last)
    assert torch.equal(cut, whole)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_sum_has_the_same_bits_with_any_other_rows_and_panels(storage: str) -> None:
    packed = pack(torch.randn(64, 226), storage=storage)
    x = torch.randn(6, 226)
    whole = torch.zeros(6, 64)
    product(packed, x, range(4), whole)
    for rows, first, last in itertools.product(range(1, 7), range(4), range(1, 5)):
        if first < last:
            tile = torch.zeros(rows, 64)
            product(packed, x[:rows], range(first, last), tile)
            columns = slice(16 * first, 16 * last)
            assert torch.equal(tile[:, : 16 * (last - first)], whole[:rows, columns])


def test_only_the_panels_asked_for_are_written() -> None:
    packed, tile = pack(torch.randn(64, 5)), torch.zeros(6, 64)
    product(packed, torch.randn(4, 5), range(2), tile)
    assert tile[:4, :32].all()
    assert not tile[4:].any()
    assert not tile[:, 32:].any()


@pytest.mark.parametrize(
    ("triple", "features", "expected"),
    [
        ("x86_64-unknown-linux-gnu", "+avx2,+fma,+avx512f", [4, 4, 4, 4, 4, 4]),
        ("x86_64-unknown-linux-gnu", "+avx2,+fma", [4, 2, 2, 1, 1, 1]),
        ("aarch64-unknown-linux-gnu", "+neon", [4, 2, 2, 1, 1, 1]),
        ("arm64-apple-darwin24", "", [4, 2, 2, 1, 1, 1]),
    ],
)
def test_as_many_panels_are_held_as_registers_allow(triple: str, features: str, expected: list[int]) -> None:
    assert [panels_at_once(rows, triple, features) for rows in range(1, 7)] == expected
