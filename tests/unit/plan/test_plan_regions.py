"""Dealing components so that ranks come out level."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.regions import deal, ranges_of


def test_kv_groups_that_do_not_divide_go_two_to_one_and_the_neurons_make_up_for_it() -> None:
    """The demo model at two ranks: 3 groups of 512·576 elements, 1536 neurons of 3·576."""
    groups = deal(3, 2, 512 * 576, [0.0, 0.0])
    assert groups == (2, 1)
    loads = [count * 512 * 576.0 for count in groups]
    neurons = deal(1536, 2, 3 * 576, loads)
    assert sum(neurons) == 1536
    assert all(count % 16 == 0 for count in neurons)
    ranks = [load + count * 3 * 576 for load, count in zip(loads, neurons, strict=True)]
    assert max(ranks) / min(ranks) < 1.02


def test_query_heads_stay_within_one_kv_head_where_ranks_outnumber_kv_heads() -> None:
    """9 heads in 3 groups over 4 ranks: no rank's heads cross a border between groups."""
    shares = deal(9, 4, 1.0, [0.0] * 4, coarser=3)
    assert sum(shares) == 9
    bounds = [sum(shares[:rank]) for rank in range(5)]
    for start, stop in itertools.pairwise(bounds):
        assert start // 3 == (stop - 1) // 3


@given(
    count=st.integers(1, 3000),
    loads=st.lists(st.floats(0, 1e6), min_size=1, max_size=12),
    weight=st.floats(1.0, 1e4),
)
def test_every_component_goes_to_one_rank_and_every_rank_gets_one(
    count: int, loads: list[float], weight: float
) -> None:
    if count < len(loads):
        return
    shares = deal(count, len(loads), weight, loads)
    assert sum(shares) == count
    assert min(shares) >= 1


def test_equal_ranks_get_equal_shares() -> None:
    assert deal(28672, 8, 5.0, [3.0] * 8) == (3584,) * 8


@pytest.mark.parametrize(
    ("indices", "expected"),
    [([], ()), ([3], ((3, 4),)), ([0, 1, 2, 5, 7, 8], ((0, 3), (5, 6), (7, 9)))],
)
def test_indices_become_ranges(indices: list[int], expected: tuple[tuple[int, int], ...]) -> None:
    assert ranges_of(torch.tensor(indices, dtype=torch.long)) == expected
