"""A verdict rests on ids under the rule of equality, with the noise of sampling, and on log-likelihood."""

from __future__ import annotations

import copy

import pytest

from shoal.bench.contender import EngineContender
from shoal.bench.verdict import Round, agreement, likelihood
from shoal.sampling_params import SamplingParams
from support.toy import VOCABULARY, ToyEngine, table

PROMPTS = [[index] for index in range(12)]
GREEDY = {"temperature": 0.0, "seed": 0}
SAMPLED = {"temperature": 0.7, "n": 3, "seed": 5}


def contender(logits: list[list[float]]) -> EngineContender:
    return EngineContender("toy", {"model": "toy"}, lambda _: ToyEngine(logits))


def asked(reference: EngineContender, sampling: dict[str, float]) -> Round:
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **sampling) for _ in PROMPTS]  # type: ignore[arg-type]
    return Round(PROMPTS, params, reference.run(PROMPTS, params))


def moved(logits: list[list[float]], by: float) -> list[list[float]]:
    """Every logit a little elsewhere, by turns up and down."""
    return [
        [logit + (by if (row + i) % 2 else -by) for i, logit in enumerate(r)] for row, r in enumerate(logits)
    ]


def tied(logits: list[list[float]], by: float) -> list[list[float]]:
    """The runner-up of every row stands ``by`` under the best."""
    logits = copy.deepcopy(logits)
    for row in logits:
        best, second = sorted(range(VOCABULARY), key=row.__getitem__)[-1:-3:-1]
        row[second] = row[best] - by
    return logits


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_the_same_model_agrees(sampling: dict[str, float]) -> None:
    reference, other = contender(table()), contender(table())
    round_ = asked(reference, sampling)
    found = agreement(reference, other, [round_], [other.run(PROMPTS, round_.params)])
    assert (found.requests, found.differing, found.is_equal) == (12 * sampling.get("n", 1), 0, True)
    assert likelihood(reference, other, round_).is_equal


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_another_model_is_no_tie_and_another_likelihood(sampling: dict[str, float]) -> None:
    reference, other = contender(table()), contender(table(1))
    round_ = asked(reference, sampling)
    found = agreement(reference, other, [round_], [other.run(PROMPTS, round_.params)])
    assert found.first is not None and not found.first.is_tie
    assert not found.is_equal
    assert not likelihood(reference, other, round_).is_equal


def test_ties_are_followed_to_the_end_and_counted() -> None:
    """Where two tokens are 1e-5 apart and the other run sees them the other way round."""
    near = tied(table(), 1e-5)
    reference, other = contender(near), contender(moved(near, 1e-5))
    round_ = asked(reference, GREEDY)
    found = agreement(reference, other, [round_], [other.run(PROMPTS, round_.params)])
    assert found.differing > 0
    assert found.ties > found.differing, "a request has more than one"
    assert found.first is not None and found.first.is_tie and found.first.gap < 1e-4
    assert not found.is_equal, "more than 1% of the requests differ"
    assert likelihood(reference, other, round_).is_equal


def test_a_small_shift_of_the_likelihood_is_seen_where_ids_are_equal() -> None:
    """A flatter model chooses the same tokens and is less sure of them."""
    reference = contender(table())
    other = contender([[logit * 0.999 for logit in row] for row in table()])
    round_ = asked(reference, GREEDY)
    assert agreement(reference, other, [round_], [other.run(PROMPTS, round_.params)]).is_equal
    found = likelihood(reference, other, round_)
    assert found.other < found.reference and not found.is_equal


def test_at_most_64_places_are_scored() -> None:
    reference = contender(table())
    found = likelihood(reference, reference, asked(reference, GREEDY))
    assert 48 < found.positions <= 64
