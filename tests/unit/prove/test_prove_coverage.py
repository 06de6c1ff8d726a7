"""How much of every listed family is split without a collective in between, at 2 ranks.

Column-row in every attention and MLP block, each with one sum; the exceptions are written down here with
the operation that forbids it, and the plan's reason must name it. The fast suite takes a seeded third.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from shoal.plan.footprint import footprint
from shoal.plan.skeleton import build_on_meta
from shoal.plan.types import Plan, pattern_of
from shoal.prove import plan_and_prove
from support.zoo.catalogue import LISTED, UNLISTED

SEED = 5
MAX_RANK_SHARE = 0.62

EXCEPTIONS = {
    "deberta:talking heads": "different numbers of components",  # a linear over the heads mixes them
    "reformer": "decides by",  # hashing detaches, rotates by numbers drawn for all heads at once, and sorts
}
"""Family -> what its plan's reason must say of weights inside its layers."""

SHARED = re.compile(
    r"every rank needs all of it"
)  # one KV head, a latent: less is duplicated than it would cost
"""Weights that all ranks hold because all need them whole, within a block that is split."""


def families() -> list[Any]:
    draw = random.Random(SEED)
    return [
        pytest.param(name, marks=() if draw.random() < 1 / 3 else pytest.mark.full) for name in sorted(LISTED)
    ]


@pytest.mark.parametrize("name", families())
def test_blocks_are_split_column_row_with_one_sum_each(name: str) -> None:
    model_class, config = LISTED[name].load()
    plan = plan_and_prove(model_class, config, 2)
    reasons = _left_over(plan)
    if name in EXCEPTIONS:
        assert reasons and all(EXCEPTIONS[name] in reason for reason in reasons.values()), reasons
    else:
        assert not reasons, reasons
        assert len({region.consumer for region in plan.regions}) == len(plan.regions)  # one sum a block
    model = build_on_meta(model_class, config)
    whole = footprint(Plan(1, plan.model_class), model, 4).ranks[0].weight_bytes
    largest = max(rank.weight_bytes for rank in footprint(plan, model, 4).ranks)
    assert largest <= MAX_RANK_SHARE * whole


def _left_over(plan: Plan) -> dict[str, str]:
    """Weights inside a stack of layers that are neither column nor row, and why; small ones left out."""
    return {
        pattern: split.reason
        for pattern, split in plan.params.items()
        if split.op in ("gather", "replicate")
        and ".*." in pattern_of(pattern)
        and "small:" not in split.reason
        and not SHARED.search(split.reason)
    }


def test_a_weight_as_wide_as_there_are_layers_is_planned_at_its_real_width() -> None:
    """markuplm's linear takes an embedding from each of a list, of which the short model has fewer."""
    model_class, config = UNLISTED["markuplm"].load()
    plan = plan_and_prove(model_class, config, 2)
    inner = next(split for name, split in plan.params.items() if name.endswith("xpath_unitseq2_inner.weight"))
    assert inner.op == "gather"
    assert footprint(plan, build_on_meta(model_class, config), 4).ranks[0].weight_bytes > 0
