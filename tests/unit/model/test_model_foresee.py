"""How a model will be served is seen before its weights are there."""

from __future__ import annotations

import pytest

from shoal.model.foresee import foresee
from shoal.prove.prove import plan_and_prove
from support.zoo.catalogue import family_of


@pytest.mark.parametrize(
    ("name", "way", "cost"),
    [
        ("llama", "paged", ""),
        ("bloom", "padded", ""),
        ("openai", "recompute", "every token costs a pass"),
        ("mamba2", "state", "no prefix is reused"),
    ],
)
def test_the_way_is_that_of_a_small_model_of_the_class(name: str, way: str, cost: str) -> None:
    model_class, config = family_of(name).load()
    found = foresee(plan_and_prove(model_class, config, 1), model_class, config)
    assert found is not None and found.way == way
    assert cost in found.cost and bool(found.cost) == bool(cost)
    assert all(reason.startswith("not ") for reason in found.reasons) and bool(found.reasons) == (
        way != "paged"
    )


def test_of_an_encoder_there_is_none() -> None:
    model_class, config = family_of("bert").load()
    assert foresee(plan_and_prove(model_class, config, 1), model_class, config) is None
