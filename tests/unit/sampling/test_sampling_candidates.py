"""Beams get their most likely tokens, edited as a search wants them; forced tokens come on all rows."""

from __future__ import annotations

from typing import Any

import torch

from shoal.messages import SamplingSpec, SequenceStep, pack_ids
from shoal.sampling.sampler import sample

VOCABULARY = 50


def row(
    sequence_id: int = 0, forced_id: int = -1, history: list[int] | None = None, **spec: Any
) -> SequenceStep:
    return SequenceStep(
        sequence_id=sequence_id,
        start=4,
        token_ids=pack_ids([1]),
        block_ids=pack_ids([0]),
        sampling=SamplingSpec(**{"temperature": 0.0, **spec}),
        history=pack_ids(history or []),
        forced_id=forced_id,
    )


def logits(rows: int = 1) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0))


def test_candidates_are_the_most_likely_tokens() -> None:
    scores = logits()
    (got,) = sample(scores, [row(num_candidates=8)])
    values, ids = scores[0].log_softmax(-1).topk(8)
    assert (list(got.top_ids), list(got.top_logprobs)) == (ids.tolist(), values.tolist())
    assert got.token_id == ids[0] and got.logprob is None


def test_edits_come_after_the_log_softmax() -> None:
    """A penalty makes a log-probability, which is below 0, lower; nothing is normalised again."""
    scores = logits()
    likely = int(scores[0].argmax())
    (got,) = sample(scores, [row(num_candidates=VOCABULARY, repetition_penalty=2.0, history=[likely])])
    expected = scores[0].log_softmax(-1)
    expected[likely] *= 2.0
    assert dict(zip(got.top_ids, got.top_logprobs, strict=True)) == dict(enumerate(expected.tolist()))


def test_a_forced_token_is_the_only_candidate() -> None:
    (got,) = sample(logits(), [row(num_candidates=8, forced_id=17)])
    assert (got.top_ids, got.top_logprobs) == ((17,), (0.0,))


def test_forced_tokens_come_whatever_is_asked_for() -> None:
    specs: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"logit_bias": {17: -100.0}}]
    got = sample(logits(3), [row(n, forced_id=17, **spec) for n, spec in enumerate(specs)])
    assert [token.token_id for token in got] == [17, 17, 17]


def test_other_rows_do_not_notice() -> None:
    scores = logits(3)
    others = [row(1), row(2, temperature=0.8, seed=5, logprobs=3)]
    assert sample(scores, [row(num_candidates=8), *others])[1:] == sample(scores[1:], others)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    scores = logits(2)
    scores[0, 3] = torch.nan
    failed, got = sample(scores, [row(0, num_candidates=4), row(1, num_candidates=4)])
    assert failed.error and not failed.top_ids and len(got.top_ids) == 4
