"""Cutting tensors and arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.cutting import argument_hook, cut_argument, cut_ranges
from shoal.plan.types import ArgumentSlice

ALIBI = ArgumentSlice("m", "alibi", 0, 4, (((0, 3),), ((3, 4),)))


def test_ranges_are_joined_in_order_in_memory_of_their_own() -> None:
    whole = torch.arange(10)
    part = cut_ranges(whole, 0, ((7, 9), (1, 3)))
    assert part.tolist() == [7, 8, 1, 2]
    one = cut_ranges(whole, 0, ((2, 4),))
    assert one.untyped_storage().nbytes() == 2 * 8
    assert cut_ranges(whole, 0, ()).shape == (0,)


def test_every_repetition_of_the_pattern_is_cut() -> None:
    """Two rows of four heads in one dimension: rank 0 keeps three of each four."""
    assert cut_argument(torch.arange(8), ALIBI, 0).tolist() == [0, 1, 2, 4, 5, 6]
    assert cut_argument(torch.arange(8), ALIBI, 1).tolist() == [3, 7]


def test_a_part_of_a_repetition_is_an_error() -> None:
    with pytest.raises(PlanError, match="no multiple of 4"):
        cut_argument(torch.arange(6), ALIBI, 0)


class Echo(nn.Module):
    def forward(self, first: torch.Tensor, alibi: torch.Tensor | None = None) -> torch.Tensor | None:
        return first if alibi is None else alibi


@pytest.mark.parametrize("argument", ["alibi", "#1"])
def test_keywords_and_positions_are_cut_and_absent_ones_left(argument: str) -> None:
    module = Echo()
    cut = ArgumentSlice("m", argument, 0, 4, ALIBI.ranges)
    module.register_forward_pre_hook(argument_hook(cut, 1), with_kwargs=True)
    x = torch.arange(4)
    got = module(x, alibi=x) if argument == "alibi" else module(x, x)
    assert got.tolist() == [3]
    assert module(x).tolist() == [0, 1, 2, 3]
    assert module(x, alibi=None).tolist() == [0, 1, 2, 3]
