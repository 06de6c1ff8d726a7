"""What packing keeps of a weight, how much memory that is, and what is refused."""

from __future__ import annotations

import pytest
import torch

from shoal.cpu_kernels.layout import STORAGES, interleave, pack, unpack

SIZES = [(1, 1), (15, 7), (16, 64), (17, 33), (100, 65)]


@pytest.mark.parametrize(("columns", "depth"), SIZES)
def test_a_float32_weight_comes_back_bit_by_bit(columns: int, depth: int) -> None:
    weight = torch.randn(columns, depth)
    assert torch.equal(unpack(pack(weight)), weight)


@pytest.mark.parametrize(("columns", "depth"), SIZES)
def test_a_bfloat16_weight_is_rounded_to_nearest(columns: int, depth: int) -> None:
    weight = torch.randn(columns, depth)
    assert torch.equal(unpack(pack(weight, storage="bfloat16")), weight.bfloat16().float())


@pytest.mark.parametrize(("columns", "depth"), SIZES)
def test_an_int8_weight_is_at_most_half_a_step_off(columns: int, depth: int) -> None:
    weight = torch.randn(columns, depth)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((unpack(pack(weight, storage="int8")) - weight).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("columns", "depth"), SIZES)
def test_an_int4_weight_is_at_most_half_a_step_off_on_average(columns: int, depth: int, group: int) -> None:
    weight = torch.randn(columns, depth)
    unpacked = unpack(pack(weight, storage="int4", group=group))
    for start in range(0, depth, group):
        part = slice(start, start + group)
        values = weight[:, part]
        spread = values.amax(1, keepdim=True) - values.amin(1, keepdim=True)
        error = (unpacked[:, part] - values).abs()
        rounding = values.abs().amax(1, keepdim=True) * 2**-8  # of the table's bfloat16
        # The ends may be cut a little where that serves the rest.
        assert (error <= spread * 0.1 + rounding).all()
        assert (error.square().mean(1, keepdim=True).sqrt() <= spread / 30 * 1.05 + rounding).all()


def test_an_int4_grid_is_fitted_to_its_numbers() -> None:
    weight = torch.randn(64, 320, generator=torch.Generator().manual_seed(0))
    error = float((unpack(pack(weight, storage="int4")) - weight).square().mean())
    assert error < 0.0055  # with grids laid between the least and the largest weight alone: 0.0058


def test_an_int4_group_of_sixteen_levels_is_kept() -> None:
    levels = torch.arange(64).remainder(16).float()
    weight = torch.stack([levels * 0.25 - 1.0, -levels * 0.5])
    assert torch.equal(unpack(pack(weight, storage="int4")), weight)


def test_a_constant_and_a_zero_group_survive_every_storage() -> None:
    weight = torch.cat([torch.zeros(2, 40), torch.full((2, 40), 0.5)])
    for storage in STORAGES:
        assert torch.allclose(unpack(pack(weight, storage=storage)), weight, atol=0, rtol=1e-6), storage


def test_storages_take_the_bytes_they_promise() -> None:
    weight = torch.randn(64, 256)
    full = weight.nbytes
    sizes = {storage: pack(weight, storage=storage).num_bytes for storage in STORAGES}
    assert sizes == {
        "float32": full,
        "bfloat16": full // 2,
        "int8": full // 4 + 64 * 4,
        "int4": full // 8 + full // 32,  # and two bfloat16 for 32 weights
    }


def test_columns_that_fill_the_last_panel_are_zero() -> None:
    packed = pack(torch.ones(17, 3), torch.ones(17))
    assert packed.data.shape == (2, 3, 16)
    assert packed.data[1, :, 1:].count_nonzero() == 0
    assert packed.bias is not None
    assert packed.bias.tolist() == [1.0] * 17 + [0.0] * 15


def test_a_transposed_weight_is_packed_as_its_transpose() -> None:
    weight = torch.randn(20, 30)
    assert torch.equal(pack(weight.T, is_transposed=True).data, pack(weight).data)


def test_interleaving_puts_sixteen_rows_of_each_in_turn() -> None:
    first, second = torch.arange(20.0), 100 + torch.arange(20.0)
    zeros = torch.zeros(12)
    expected = torch.cat([first[:16], second[:16], first[16:], zeros, second[16:], zeros])
    assert torch.equal(interleave(first, second), expected)


def test_packing_keeps_no_hold_on_the_weight() -> None:
    weight = torch.randn(32, 8)
    packed = pack(weight)
    before = packed.data.clone()
    weight.zero_()
    assert torch.equal(packed.data, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"storage": "int3"}, "storage"),
        ({"storage": "int4", "group": 48}, "group"),
        ({"weight": torch.randn(4)}, "matrix"),
        ({"weight": torch.ones(4, 4, dtype=torch.int64)}, "matrix of floats"),
        ({"weight": torch.randn(0, 4)}, "matrix"),
        ({"bias": torch.randn(5)}, r"bias: \[4\]"),
    ],
)
def test_what_cannot_be_packed_is_refused_with_the_reason(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(**{"weight": torch.randn(4, 4), **arguments})  # type: ignore[arg-type]


def test_gate_and_up_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        interleave(torch.randn(4, 4), torch.randn(5, 4))
