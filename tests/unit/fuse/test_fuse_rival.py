"""The race between our linears and torch's: what it measures, and what is made of it."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.local import LocalComm
from shoal.fuse import rival
from shoal.fuse.rival import Race, race


@pytest.mark.parametrize(
    ("few", "many", "is_won"),
    [(2.0, 1.0, True), (0.9, 0.6, True), (1.0, 0.3, False), (0.2, 2.0, False), (3.0, 0.2, True)],
)
def test_a_race_is_lost_only_by_a_clear_margin(few: float, many: float, is_won: bool) -> None:
    assert Race({1: few, 64: many}).is_won is is_won


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_race_times_both_sides(dtype: torch.dtype) -> None:
    found = race(dtype, LocalComm())
    assert list(found.ratios) == [1, 64]
    assert all(0.01 < ratio < 1000 for ratio in found.ratios.values())


def test_a_slow_linear_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(rival.PackedLinear):
        def __call__(self, x: torch.Tensor, *args: object) -> torch.Tensor:
            return [super(Slow, self).__call__(x) for _ in range(30)][-1]

    monkeypatch.setattr(rival, "PackedLinear", Slow)
    assert not race(torch.float32, LocalComm()).is_won
