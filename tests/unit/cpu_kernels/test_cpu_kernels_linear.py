"""Packed linear layers against torch in float64, and that a row never depends on its batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from shoal.cpu_kernels.layout import STORAGES, pack, unpack
from shoal.cpu_kernels.linear import PackedLinear
from shoal.jit.team import Team

COLUMNS = (1, 15, 16, 17, 100)
DEPTHS = (1, 7, 64, 576, 1536)
ROWS = (*range(1, 14), 64, 200)


def assert_product(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None = None
) -> None:
    """y = x weight^T + added, with the error that float32 sums of that many products may have."""
    expected = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if added is not None:
        expected, size = expected + added, size + added.abs()
    assert y.dtype == torch.float32
    assert ((y - expected).abs() <= 2e-6 * size + 1e-30).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("columns", "depth"), list(itertools.product(COLUMNS, DEPTHS)))
def test_every_number_of_rows_equals_torch(storage: str, columns: int, depth: int, team: Team) -> None:
    torch.manual_seed(0)
    packed = pack(torch.randn(columns, depth), torch.randn(columns), storage)
    linear, weight = PackedLinear(packed, team), unpack(packed)
    assert packed.bias is not None
    x = torch.randn(max(ROWS), depth)
    for rows in ROWS:
        assert_product(linear(x[:rows]), x[:rows], weight, packed.bias[:columns])


@pytest.mark.parametrize("group", [32, 64])
def test_int4_groups_of_both_sizes_equal_torch(group: int, team: Team) -> None:
    packed = pack(torch.randn(40, 1337), storage="int4", group=group)
    x = torch.randn(30, 1337)
    assert_product(PackedLinear(packed, team)(x), x, unpack(packed))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(storage: str, team: Team) -> None:
    packed = pack(torch.randn(100, 1536), torch.randn(100), storage)
    linear = PackedLinear(packed, team, "silu")
    x, residual = torch.randn(200, 1536), torch.randn(200, 100)
    whole = linear(x, residual=residual)
    for start, rows in ((0, 1), (57, 1), (199, 1), (3, 2), (5, 7), (100, 13), (8, 64), (1, 199)):
        part = slice(start, start + rows)
        assert torch.equal(linear(x[part], residual=residual[part]), whole[part])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("columns", [1, 16, 40, 100, 240])
def test_two_threads_give_the_same_bits_as_one(storage: str, columns: int, team: Team, pair: Team) -> None:
    packed = pack(torch.randn(columns, 100), torch.randn(columns), storage)
    for rows in (1, 7, 200):
        x = torch.randn(rows, 100)
        assert torch.equal(PackedLinear(packed, pair)(x), PackedLinear(packed, team)(x))


def test_four_threads_that_share_rows_give_the_same_bits_as_one(team: Team) -> None:
    four = Team(4)
    packed, x = pack(torch.randn(100, 50), torch.randn(100)), torch.randn(200, 50)
    assert torch.equal(PackedLinear(packed, four)(x), PackedLinear(packed, team)(x))
    four.close()


def test_without_bias_nothing_is_added(team: Team) -> None:
    weight = torch.randn(50, 30)
    assert not PackedLinear(pack(weight), team)(torch.zeros(3, 30)).any()


def test_a_residual_is_added_after_the_activation(team: Team) -> None:
    weight, bias = torch.randn(33, 20), torch.randn(33)
    x, residual = torch.randn(9, 20), torch.randn(9, 33)
    y = PackedLinear(pack(weight, bias), team, "gelu")(x, residual=residual)
    expected = torch.nn.functional.gelu(x @ weight.T + bias) + residual
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


def test_the_residual_may_be_the_output(team: Team) -> None:
    weight, x, residual = torch.randn(33, 20), torch.randn(9, 20), torch.randn(9, 33)
    linear = PackedLinear(pack(weight), team)
    expected = linear(x, residual=residual)
    assert linear(x, out=residual, residual=residual) is residual
    assert torch.equal(residual, expected)


def test_only_the_output_is_written(team: Team, pair: Team) -> None:
    packed = pack(torch.randn(17, 20), torch.randn(17))
    for threads in (team, pair):
        buffer = torch.full((9, 40), 7.0)
        PackedLinear(packed, threads)(torch.randn(7, 20), out=buffer[1:8, 3:20])
        buffer[1:8, 3:20] = 7.0
        assert (buffer == 7.0).all()


def test_rows_may_be_part_of_a_wider_buffer(team: Team) -> None:
    packed = pack(torch.randn(17, 20))
    x = torch.randn(8, 50)[:, 10:30]
    linear = PackedLinear(packed, team)
    assert torch.equal(linear(x), linear(x.contiguous()))


def test_leading_dimensions_are_kept_and_no_rows_give_no_rows(team: Team) -> None:
    linear = PackedLinear(pack(torch.randn(5, 4)), team)
    assert linear(torch.randn(2, 3, 4)).shape == (2, 3, 5)
    assert linear(torch.randn(0, 4)).shape == (0, 5)


def test_infinity_and_nan_stay_where_they_are(team: Team) -> None:
    linear = PackedLinear(pack(torch.ones(3, 8)), team)
    x = torch.ones(7, 8)
    x[1, 3], x[4, 0] = torch.inf, torch.nan
    y = linear(x)
    assert y[1].isinf().all()
    assert y[4].isnan().all()
    assert torch.equal(y[[0, 2, 3, 5, 6]], torch.full((5, 3), 8.0))


@pytest.mark.parametrize(
    ("x", "kwargs", "error", "message"),
    [
        (torch.randn(2, 5), {}, ValueError, r"x: \[\.\.\., 4\]"),
        (torch.randn(2, 4).double(), {}, TypeError, "x: float32"),
        (torch.randn(2, 4), {"residual": torch.randn(3, 5)}, ValueError, "residual: 2 rows"),
        (torch.randn(2, 4), {"out": torch.empty(2, 6)}, ValueError, "out"),
        (torch.randn(2, 4), {"out": torch.empty(5, 2).T}, ValueError, "out: contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: torch.Tensor, kwargs: dict[str, torch.Tensor], error: type[Exception], message: str, team: Team
) -> None:
    with pytest.raises(error, match=message):
        PackedLinear(pack(torch.randn(5, 4)), team)(x, **kwargs)


def test_an_unknown_activation_is_refused(team: Team) -> None:
    with pytest.raises(ValueError, match="activation: one of"):
        PackedLinear(pack(torch.randn(5, 4)), team, "snake")
