"""Model code that draws or seeds random numbers leaves the caller's generator alone."""

from __future__ import annotations

import pytest
import torch

from shoal.plan.random import own_random, seeds_undone
from shoal.prove import plan_and_prove
from support.zoo.catalogue import LISTED


def test_drawing_with_a_generator_of_its_own_leaves_the_default_one_alone() -> None:
    before = torch.get_rng_state()
    with own_random():
        first = torch.randn(3)
    with own_random():
        assert torch.equal(torch.randn(3), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_set_within_is_undone_and_numbers_drawn_within_are_not_drawn_again() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with seeds_undone():
        torch.manual_seed(4)
    assert torch.equal(torch.get_rng_state(), before)
    with seeds_undone():
        drawn = torch.randn(2)
    assert not torch.equal(torch.randn(2), drawn)


def test_a_seed_is_undone_where_the_code_raises() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="meant"), seeds_undone():
        torch.manual_seed(4)
        raise RuntimeError("meant")
    assert torch.equal(torch.get_rng_state(), before)


def test_planning_a_model_that_seeds_while_it_runs_leaves_the_default_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plan_and_prove(*LISTED["reformer"].load(), 2)
    assert torch.equal(torch.get_rng_state(), before)
