"""The greedy choice against torch.argmax."""

from __future__ import annotations

import pytest
import torch

from shoal.cpu_kernels.reduce import argmax
from shoal.jit.team import Team


@pytest.mark.parametrize("columns", [1, 2, 63, 64, 65, 1000, 49152])
def test_the_largest_of_each_row_is_found(columns: int, team: Team, pair: Team) -> None:
    x = torch.randn(13, columns)
    for threads in (team, pair):
        assert torch.equal(argmax(x, threads), x.argmax(-1))


def test_the_first_of_equal_values_wins_over_parts_and_chunks(team: Team, pair: Team) -> None:
    x = torch.zeros(6, 300)
    for row, places in enumerate([(0, 299), (64, 65), (149, 150), (10, 200), (151, 152), (299,)]):
        x[row, list(places)] = 1.0
    for threads in (team, pair):
        assert argmax(x, threads).tolist() == [0, 64, 149, 10, 151, 299]


def test_nan_is_largest_and_infinities_count(team: Team, pair: Team) -> None:
    x = torch.full((5, 200), -torch.inf)
    x[1, 150] = -3.0
    x[2, 20], x[2, 180] = torch.inf, torch.nan
    x[3, 30], x[3, 190] = torch.nan, torch.nan
    x[4, 0] = torch.nan
    for threads in (team, pair):
        assert argmax(x, threads).tolist() == [0, 150, 180, 30, 0]


def test_rows_of_a_wider_buffer_are_read_where_they_are(pair: Team) -> None:
    x = torch.randn(4, 100)[:, 20:70]
    assert torch.equal(argmax(x, pair), x.argmax(-1))


def test_what_has_no_largest_is_refused(team: Team) -> None:
    with pytest.raises(ValueError, match=r"\[M, N\]"):
        argmax(torch.zeros(3, 0), team)
    with pytest.raises(TypeError, match="float32"):
        argmax(torch.zeros(3, 2).double(), team)
