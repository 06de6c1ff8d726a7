"""Edits of logits: bias, barred stop tokens, penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sampling_reference as reference
import torch
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from shoal.sampling import processors

VOCAB = 50


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def apply(scores: torch.Tensor, *sequences: Any) -> torch.Tensor:
    edited = scores.clone()
    processors.apply(edited, sequences)
    return edited


@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    prompt, output = [3, 4, 4, 7], [7, 9, 3, 49]
    sequence = reference.make_sequence(prompt=prompt, output=output, repetition_penalty=penalty)
    scores = logits()
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), scores.clone())
    torch.testing.assert_close(apply(scores, sequence), theirs)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_repeated_ngrams_equal_transformers(size: int) -> None:
    """Histories of few tokens, so that nearly each has runs to bar; shorter ones than the run, too."""
    rng = np.random.default_rng(size)
    sequences, expected = [], []
    scores = logits(12)
    for row, length in enumerate([1, 2, 3, 4, 5, 8, 9, 12, 20, 30, 40, 60]):
        ids = rng.integers(0, 2, length).tolist()
        sequences.append(
            reference.make_sequence(
                prompt=ids[: length // 2], output=ids[length // 2 :], no_repeat_ngram_size=size
            )
        )
        theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor([ids]), scores[row : row + 1].clone())
        expected.append(theirs)
    edited = apply(scores, *sequences)
    assert torch.equal(edited, torch.cat(expected))
    assert (edited == -torch.inf).any() and all(map(processors.needs_edit, sequences))


def test_presence_and_frequency_count_the_output_only() -> None:
    sequence = reference.make_sequence(
        prompt=[1, 2, 2], output=[2, 5, 5, 5], presence_penalty=0.5, frequency_penalty=0.25
    )
    scores = logits()
    change = apply(scores, sequence) - scores
    expected = torch.zeros(1, VOCAB)
    expected[0, 2], expected[0, 5] = -0.5 - 0.25, -0.5 - 3 * 0.25
    torch.testing.assert_close(change, expected)


def test_negative_penalties_encourage() -> None:
    sequence = reference.make_sequence(output=[5, 5], presence_penalty=-1.0, frequency_penalty=-0.5)
    scores = logits()
    assert apply(scores, sequence)[0, 5] == pytest.approx(float(scores[0, 5]) + 2.0)


def test_repetition_comes_before_presence() -> None:
    sequence = reference.make_sequence(output=[5], repetition_penalty=2.0, presence_penalty=1.0)
    scores = torch.full((1, VOCAB), 4.0)
    assert apply(scores, sequence)[0, 5] == 4.0 / 2 - 1


def test_bias_comes_before_the_penalties() -> None:
    sequence = reference.make_sequence(output=[5], repetition_penalty=2.0, logit_bias={5: 6.0, 6: -6.0})
    edited = apply(torch.full((1, VOCAB), 2.0), sequence)
    assert edited[0, 5] == 4.0 and edited[0, 6] == -4.0


@pytest.mark.parametrize(("num_output", "barred"), [(0, True), (2, True), (3, False), (4, False)])
def test_stop_tokens_are_barred_until_min_tokens_are_out(num_output: int, barred: bool) -> None:
    sequence = reference.make_sequence(output=[9] * num_output, min_tokens=3, stop_ids=(4, 8))
    edited = apply(logits(), sequence)
    assert ((edited == -torch.inf).nonzero()[:, 1].tolist() == [4, 8]) == barred
    assert processors.needs_edit(sequence) == barred


def test_bias_cannot_lift_a_barred_token() -> None:
    sequence = reference.make_sequence(min_tokens=1, stop_ids=(4,), logit_bias={4: 100.0})
    assert apply(logits(), sequence)[0, 4] == -torch.inf


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    sequence = reference.make_sequence(
        prompt=[VOCAB, 10**6],
        output=[VOCAB + 1],
        logit_bias={VOCAB: 5.0, 10**9: 5.0},
        min_tokens=9,
        stop_ids=(VOCAB, 10**7),
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    scores = logits(2)
    assert torch.equal(apply(scores, sequence, sequence), scores)


def test_an_empty_output_has_no_penalty() -> None:
    sequence = reference.make_sequence(output=[], presence_penalty=2.0, frequency_penalty=2.0)
    scores = logits()
    assert torch.equal(apply(scores, sequence), scores)


def test_rows_with_different_wishes_do_not_mix() -> None:
    rng = np.random.default_rng(0)
    wishes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.5, "repetition_penalty": 0.7},
        {"logit_bias": {3: 5.0, 9: -100.0}},
        {"min_tokens": 40, "stop_ids": (1, 2)},
        {"min_tokens": 40, "stop_ids": (2,), "logit_bias": {2: 3.0}, "presence_penalty": -2.0},
    ] * 2
    sequences = [
        reference.make_sequence(
            prompt=rng.integers(0, VOCAB, 20).tolist(),
            output=rng.integers(0, VOCAB, row * 3).tolist(),
            **wish,
        )
        for row, wish in enumerate(wishes)
    ]
    scores = logits(len(wishes))
    edited = apply(scores, *sequences).numpy()
    for row, sequence in enumerate(sequences):
        expected = reference.edited(scores[row].numpy(), sequence)
        np.testing.assert_allclose(edited[row], expected, rtol=1e-5, atol=1e-6)
