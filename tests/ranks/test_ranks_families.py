"""Every family on real process groups gives what its whole model gives.

The grid is family x ranks x attention; the fast suite runs a seeded third of it, with every family in it.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.plan.types import Plan
from shoal.prove import plan_and_prove
from support.rank_pool import RankPool
from support.zoo.catalogue import LISTED, family_of
from support.zoo.cell import TOLERANCE, Reference, make_reference, run_cell

RANKS = (2, 3, 4)
SEED = 2026


def grid() -> list[Any]:
    """All cells; of every family those of one rank count, drawn by the seed, are in the fast suite."""
    draw = random.Random(SEED)
    cells = []
    for name, family in LISTED.items():
        in_fast_suite = draw.choice(RANKS)
        for ranks in RANKS:
            marks = [] if ranks == in_fast_suite else [pytest.mark.full]
            for attention in family.attention:
                cells.append(
                    pytest.param(name, ranks, attention, marks=marks, id=f"{name}-{ranks}-{attention}")
                )
    return cells


@functools.cache
def plan_of(name: str, ranks: int) -> tuple[Plan, float]:
    """The proved plan, and the seconds it took."""
    started = time.monotonic()
    plan = plan_and_prove(*family_of(name).load(), ranks)
    return plan, time.monotonic() - started


@functools.cache
def reference_of(name: str, attention: str) -> Reference:
    return make_reference(family_of(name), attention)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """A line a cell, printed when the last has run."""
    lines: list[str] = []
    yield lines
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\nfamily ranks attention: errors padded left and right; tokens; planning", *lines, sep="\n")


@pytest.mark.parametrize(("name", "ranks", "attention"), grid())
def test_outputs_and_greedy_tokens_equal_the_whole_models(
    name: str, ranks: int, attention: str, rank_pool: RankPool, table: list[str]
) -> None:
    if not family_of(name).has_attention(attention):
        pytest.skip(f"this version of transformers has no {attention} attention for {name}")
    plan, seconds = plan_of(name, ranks)
    reference = reference_of(name, attention)
    answers = rank_pool.run(run_cell, name, plan.to_dict(), attention, reference, ranks=ranks)
    errors = [max(rank) for rank in zip(*(answer.errors for answer in answers), strict=True)]
    said = [
        f"{error:.0e} ({'float64' if TOLERANCE[expected.dtype] < 1e-6 else 'float32'})"
        for error, expected in zip(errors, reference.forwards, strict=True)
    ]
    is_equal = all(answer.tokens == reference.tokens for answer in answers)
    tokens = "-" if reference.dtype is None else "equal" if is_equal else "DIFFER"
    table.append(f"{name} {ranks} {attention}: {', '.join(said)}; {tokens}; {seconds:.1f} s")
    for error, expected in zip(errors, reference.forwards, strict=True):
        assert error < TOLERANCE[expected.dtype], f"padded {expected.padding}"
    assert is_equal
