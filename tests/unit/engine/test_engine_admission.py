"""Requests are admitted with every default filled in, and refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.engine.admission import Admission
from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams


def admission(**changes: Any) -> Admission:
    fields: dict[str, Any] = {
        "vocab_size": 10,
        "eos_ids": frozenset({9}),
        "model_defaults": {},
        "seed": 0,
        "replica_index": 0,
    }
    return Admission(**{**fields, **changes})


def seed(admitting: Admission) -> int:
    return admitting.spec("r", [1], SamplingParams()).sampling[0].seed


def test_the_models_defaults_fill_what_is_unset() -> None:
    admitting = admission(model_defaults={"temperature": 0.6, "top_k": 5})
    (sampling,) = admitting.spec("r", [1], SamplingParams(top_k=-1)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 0, 1.0)


def test_a_drawn_seed_depends_on_engine_replica_and_how_many_came_before() -> None:
    seeds = {
        seed(admission()),
        seed(admission(seed=1)),
        seed(admission(replica_index=1)),
        seed(admission(num_admitted=1)),
    }
    assert len(seeds) == 4
    assert seed(admission()) == seed(admission())


def test_a_negative_seed_becomes_unsigned() -> None:
    assert admission().spec("r", [1], SamplingParams(seed=-1)).sampling[0].seed == 2**64 - 1


def test_branches_share_the_seed_and_are_numbered() -> None:
    branches = admission().spec("r", [1], SamplingParams(n=3)).sampling
    assert [sampling.branch for sampling in branches] == [0, 1, 2]
    assert len({sampling.seed for sampling in branches}) == 1


@pytest.mark.parametrize(
    ("params", "barred"),
    [
        (SamplingParams(min_tokens=2, stop_token_ids=[3]), (3, 9)),
        (SamplingParams(min_tokens=2, stop_token_ids=[3], ignore_eos=True), (3,)),
        (SamplingParams(stop_token_ids=[3]), ()),
    ],
)
def test_tokens_that_end_are_barred_only_before_min_tokens(
    params: SamplingParams, barred: tuple[int, ...]
) -> None:
    assert admission().spec("r", [1], params).sampling[0].stop_ids == barred


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(stop_token_ids=[10]), "stop_token_ids"),
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias"),
        ({"max_tokens": 3}, "sampling_params"),
    ],
)
def test_what_the_engine_cannot_take_is_refused_by_field(params: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        admission().spec("r", [1], params)
    assert caught.value.field == field
