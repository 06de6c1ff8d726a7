"""What is done to one rank's part is done to the others', in the same order."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.errors import UsageError
from shoal.parallel.parts import Drop, Journal, Operation, Part, make_part, plain, replay


class Ranks:
    """Rank 0's part, and another rank's own tensor under its number."""

    def __init__(self, shape: tuple[int, ...] = (4, 2, 5, 3)) -> None:
        self.journal = Journal()
        self.other = torch.randn(shape)
        self.part = make_part(torch.randn(shape), self.journal.new_handle())
        self.store = {self.part.handle.number: self.other.clone()}

    def check(self, function: Callable[[Any], Any]) -> None:
        """The other rank comes to what the function gives on an ordinary tensor of its own."""
        made = function(self.part)
        expected = function(self.other.clone())
        replay(self.journal.take(), self.store)
        assert type(made) is Part
        torch.testing.assert_close(self.store[made.handle.number], expected)


INDEX = torch.tensor([2, 0, 0, 1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.index_select(0, INDEX),
        lambda x: x[..., :-2, :],
        lambda x: x.repeat_interleave(3, dim=0),
        lambda x: torch.cat([x[1:], x[:1]], 0),
        lambda x: x.split(2)[1],
        lambda x: x.to("cpu", torch.float64).mT,
        lambda x: copy.deepcopy(x),
        lambda x: copy.deepcopy([x, x])[1] * 2,
        lambda x: torch.nn.functional.pad(x, (1, 0)),
        lambda x: torch.max(x, 0).values,
    ],
)
def test_what_torch_makes_of_a_part_the_others_make_of_theirs(function: Callable[[Any], Any]) -> None:
    Ranks().check(function)


def test_changes_in_place_reach_views_and_not_copies() -> None:
    def change(x: Any) -> Any:
        kept, view = copy.deepcopy(x), x[:2]
        view.zero_()
        x[3] = 7.0
        x += 1
        return torch.cat([kept, x])

    Ranks().check(change)


def test_an_argument_counts_as_it_was_at_the_time() -> None:
    def reorder(x: Any) -> Any:
        index = torch.tensor([3, 2, 1, 0])
        out = x.index_select(0, index)
        index.zero_()
        return out

    Ranks().check(reorder)


def test_sizes_and_numbers_are_not_noted_and_not_parts() -> None:
    ranks = Ranks()
    assert ranks.part.shape == (4, 2, 5, 3) and ranks.part.numel() == 120
    assert type(ranks.part.sum().item()) is float and type(ranks.part.tolist()) is list
    assert ranks.journal.take() == []


def test_what_only_led_to_dropped_tensors_is_not_told() -> None:
    ranks = Ranks()
    for _ in range(3000):
        (ranks.part * 2).norm()
    assert len(ranks.journal) < 2000, "it is tidied on the way"
    assert ranks.journal.take() == []


def test_a_dropped_part_is_dropped_by_the_others_once_what_needs_it_is_done() -> None:
    ranks = Ranks()
    number = ranks.part.handle.number
    made = ranks.part.index_select(0, INDEX)
    del ranks.part
    gc.collect()
    entries = ranks.journal.take()
    assert [type(entry) for entry in entries] == [Operation, Drop]
    replay(entries, ranks.store)
    assert set(ranks.store) == {made.handle.number} and number not in ranks.store


def test_a_part_shares_its_tensors_memory() -> None:
    tensor = torch.zeros(3)
    part = make_part(tensor, Journal().new_handle())
    plain(part).fill_(2)
    assert tensor.tolist() == [2, 2, 2] and type(plain(part)) is torch.Tensor


def test_its_memory_cannot_be_exchanged() -> None:
    with pytest.raises(UsageError, match="make a new cache"):
        Ranks().part.data = torch.zeros(1)
