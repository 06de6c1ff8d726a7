"""Rows picked by number."""

from __future__ import annotations

import pytest
import torch

from shoal.cpu_kernels.rows import pick_rows
from shoal.jit.team import Team


def test_the_rows_asked_for_come_in_their_order(team: Team, pair: Team) -> None:
    x = torch.randn(9, 50)[:, 3:40]
    numbers = torch.tensor([8, 0, 3, 3])
    for threads in (team, pair):
        assert torch.equal(pick_rows(x, numbers, threads), x[numbers])


def test_no_rows_asked_for_are_no_rows(team: Team) -> None:
    assert pick_rows(torch.randn(3, 4), torch.zeros(0, dtype=torch.int64), team).shape == (0, 4)


@pytest.mark.parametrize("numbers", [[3], [-1], [0, 7]])
def test_a_number_that_is_no_row_is_refused(numbers: list[int], team: Team) -> None:
    with pytest.raises(IndexError, match="0 to 2"):
        pick_rows(torch.randn(3, 4), torch.tensor(numbers), team)
    with pytest.raises(TypeError, match="int64"):
        pick_rows(torch.randn(3, 4), torch.tensor([0.0]), team)
