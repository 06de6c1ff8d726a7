"""Reshapes to a width that code took from its input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.plan.repair import repair, repaired_sizes, reshape_sizes


class FromInput(nn.Module):
    """Reshapes what it made to the width of its input."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, batch, width = x.size()
        made = torch.arange(float(tokens * batch * self.features)).view(tokens, batch, 2, -1)
        return made.reshape(tokens, batch, width)


def test_a_size_that_does_not_fit_is_replaced_by_the_ranks() -> None:
    assert repaired_sizes((5, 2, 3, 8), (5, 2, 64), 64, 24) == (5, 2, 24)


def test_what_fits_is_left_alone() -> None:
    assert repaired_sizes((5, 2, 64), (5, 2, 64), 64, 24) is None


def test_a_width_that_explains_nothing_is_not_used() -> None:
    assert repaired_sizes((5, 2, 3, 8), (5, 2, 64), 64, 16) is None
    assert repaired_sizes((5, 2, 3, 8), (5, 2, 64), 32, 24) is None


def test_a_free_size_is_never_repaired_for_it_fits_whatever_the_width() -> None:
    assert repaired_sizes((3, 1, 24), (-1, 64), 64, 24) is None


def test_of_two_equal_sizes_the_one_is_meant_that_leaves_the_other_dimensions_in_place() -> None:
    assert repaired_sizes((64, 2, 3, 8), (64, 2, 64), 64, 24) == (64, 2, 24)
    assert repaired_sizes((3, 8, 64), (64, 64), 64, 24) == (24, 64)


def test_two_equal_sizes_that_explain_it_equally_are_refused() -> None:
    assert repaired_sizes((8 * 64 * 24,), (64, 8, 64), 64, 24) is None


def test_the_sizes_of_every_spelling_are_read() -> None:
    x = torch.zeros(6)
    assert reshape_sizes(torch.Tensor.view, (x, 2, 3), {}) == (2, 3)
    assert reshape_sizes(torch.Tensor.reshape, (x, (2, 3)), {}) == (2, 3)
    assert reshape_sizes(torch.reshape, (x,), {"shape": (2, 3)}) == (2, 3)
    assert reshape_sizes(torch.Tensor.view, (x, torch.int32), {}) is None
    assert reshape_sizes(torch.Tensor.transpose, (x, 0, 1), {}) is None


def test_a_module_is_repaired_in_its_forward_only_and_the_repair_can_be_undone() -> None:
    module, whole = FromInput(24), torch.zeros(5, 2, 64)
    undo = repair(module, [(64, 24)])
    assert module(whole).shape == (5, 2, 24)
    assert type(module).__name__ == "FromInput"
    with pytest.raises(RuntimeError, match="invalid for input"):
        torch.zeros(5 * 2 * 24).view(5, 2, 64)
    undo()
    with pytest.raises(RuntimeError, match="invalid for input"):
        module(whole)


def test_a_copy_of_a_repaired_module_is_repaired_too() -> None:
    module = FromInput(24)
    repair(module, [(64, 24)])
    assert copy.deepcopy(module)(torch.zeros(5, 2, 64)).shape == (5, 2, 24)


def test_two_widths_that_would_give_different_shapes_are_refused() -> None:
    module = FromInput(32)
    repair(module, [(64, 32), (8, 4)])  # [8, 8, 64] of half the elements: either may be meant
    with pytest.raises(RuntimeError, match="invalid for input"):
        module(torch.zeros(8, 3, 64).expand(8, 3, 64)[:, :1].expand(8, 8, 64))
