"""How a model will be served is seen before its weights are there."""

from __future__ import annotations

import pytest
import transformers as T

from shoal.model.foresee import foresee
from shoal.prove.prove import plan_and_prove
from support.zoo.catalogue import family_of


@pytest.mark.parametrize(
    ("name", "way", "cost"),
    [
        ("llama", "paged", ""),
        ("bloom", "padded", "padded to the longest"),
        ("openai", "recompute", "every token costs a pass"),
        ("mamba2", "state", "no prefix is reused"),
        ("t5", "seq2seq", ""),
        ("led", "seq2seq", "of equal length together"),
        ("bert", "packed", ""),
        ("convbert", "alone", "one text is computed after the other"),
    ],
)
def test_the_way_is_that_of_a_small_model_of_the_class(name: str, way: str, cost: str) -> None:
    model_class, config = family_of(name).load()
    found = foresee(plan_and_prove(model_class, config, 1), model_class, config)
    assert found is not None and found.way == way, found
    assert cost in found.cost and bool(found.cost) == bool(cost)
    assert all(reason.startswith("not ") for reason in found.reasons)
    assert bool(found.reasons) == (way not in ("paged", "seq2seq", "packed"))


def test_of_what_is_not_served_there_is_none() -> None:
    model_class, config = T.T5Model, family_of("t5").load()[1]
    assert foresee(plan_and_prove(model_class, config, 1), model_class, config) is None
