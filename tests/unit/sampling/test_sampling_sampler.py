"""``sample``: every row as if it were alone, failures included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sampling_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.messages import SamplingSpec, SequenceStep, TokenResult, pack_ids
from shoal.sampling import sample

VOCAB = 300

WISHES = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 7, 250, 1000]),
        "top_p": st.sampled_from([0.1, 0.8, 0.99, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "branch": st.integers(0, 3),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "min_tokens": st.integers(0, 6),
        "stop_ids": st.just((1, 2, 250)),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB + 5), st.floats(-100, 100), max_size=3),
        "logprobs": st.integers(0, 20),
    },
)


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def tokens_of(results: tuple[TokenResult, ...]) -> list[int]:
    assert all(result.error is None for result in results), results
    return [result.token_id for result in results]


def random_sequences(wishes: list[dict[str, Any]], seed: int) -> list[SequenceStep]:
    rng = np.random.default_rng(seed)
    return [
        reference.make_sequence(
            row,
            prompt=rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist(),
            output=rng.integers(0, VOCAB, int(rng.integers(0, 12))).tolist(),
            **wish,
        )
        for row, wish in enumerate(wishes)
    ]


@settings(max_examples=40, deadline=None)
@given(wishes=st.lists(WISHES, min_size=1, max_size=8), seed=st.integers(0, 2**32 - 1))
def test_a_batch_equals_the_plain_reference_row_by_row(wishes: list[dict[str, Any]], seed: int) -> None:
    scores = logits(len(wishes), seed)
    sequences = random_sequences(wishes, seed)
    expected = [reference.chosen(scores[r].numpy(), s) for r, s in enumerate(sequences)]
    assert tokens_of(sample(scores, sequences)) == expected


@settings(max_examples=15, deadline=None)
@given(wishes=st.lists(WISHES, min_size=2, max_size=6), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_results_do_not_depend_on_the_batch_or_its_order(
    wishes: list[dict[str, Any]], seed: int, data: st.DataObject
) -> None:
    scores = logits(len(wishes), seed)
    sequences = random_sequences(wishes, seed)
    together = sample(scores, sequences)
    order = data.draw(st.permutations(range(len(wishes))))
    shuffled = sample(scores[list(order)], [sequences[row] for row in order])
    assert tokens_of(shuffled) == [together[row].token_id for row in order]
    for row, sequence in enumerate(sequences):
        (alone,) = sample(scores[row : row + 1], [sequence])
        assert alone.token_id == together[row].token_id and alone.rank == together[row].rank
        assert alone.top_ids == together[row].top_ids


def test_all_greedy_is_argmax_with_the_lowest_id_among_equals() -> None:
    scores = torch.zeros(3, 1000)
    scores[1, 500:600] = 2.0
    scores[2, 999] = 1.0
    sequences = [reference.make_sequence(row, temperature=0.0) for row in range(3)]
    assert tokens_of(sample(scores, sequences)) == [0, 500, 999]


def test_greedy_rows_as_they_are_and_edited_and_drawn_ones_do_not_disturb_each_other() -> None:
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {3: 100.0}},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.0},
    ]
    scores = logits(4)
    sequences = [reference.make_sequence(row, **wish) for row, wish in enumerate(wishes)]
    found = tokens_of(sample(scores, sequences))
    best = scores.argmax(dim=-1).tolist()
    assert [found[0], found[1], found[3]] == [best[0], 3, best[3]]
    assert found[2] in scores[2].topk(5).indices.tolist()


@pytest.mark.parametrize("place", [0, 77, 998])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_is_found_wherever_it_is(bad: float, place: int) -> None:
    scores = torch.zeros(3, 999)
    scores[:, 500] = 1.0
    scores[1, place] = bad
    results = sample(scores, [reference.make_sequence(row, temperature=0.0) for row in range(3)])
    assert [result.error is not None for result in results] == [False, True, False]
    assert [results[0].token_id, results[2].token_id] == [500, 500]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float_dtype_is_taken_and_left_unchanged(dtype: torch.dtype) -> None:
    scores = logits(4).to(dtype)
    before = scores.clone()
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "logit_bias": {5: 100.0}},
        {"temperature": 0.7, "top_k": 5},
        {"repetition_penalty": 1.5},
    ]
    sequences = [reference.make_sequence(row, **wish) for row, wish in enumerate(wishes)]
    results = sample(scores, sequences)
    expected = [reference.chosen(scores[r].float().numpy(), s) for r, s in enumerate(sequences)]
    assert tokens_of(results) == expected
    assert torch.equal(scores, before)


def test_the_sampled_position_is_the_one_after_the_steps_tokens() -> None:
    """A replayed prompt, however chunked, draws the same token."""
    scores = logits(1)
    decode = reference.make_sequence(position=10, seed=3)
    chunk = SequenceStep(
        sequence_id=0, start=4, token_ids=pack_ids([0] * 6), block_ids=b"", sampling=decode.sampling
    )
    later = reference.make_sequence(position=11, seed=3)
    flat = torch.zeros_like(scores)
    assert sample(flat, [decode]) == sample(flat, [chunk]) != sample(flat, [later])


def test_branches_and_seeds_differ() -> None:
    flat = torch.zeros(40, 5000)
    rows = [reference.make_sequence(row, seed=row % 20, branch=row // 20) for row in range(40)]
    assert len(set(tokens_of(sample(flat, rows)))) > 35


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_nan_or_inf_fails_alone(temperature: float, bad: float) -> None:
    scores = logits(4)
    sequences = [
        reference.make_sequence(row, temperature=temperature, logprobs=2, min_tokens=5, stop_ids=(17,))
        for row in range(4)
    ]
    clean = sample(scores, sequences)
    scores[1, 17] = bad
    scores[3] = -torch.inf
    results = sample(scores, sequences)
    assert results[0] == clean[0] and results[2] == clean[2]
    for row in (1, 3):
        assert results[row].error is not None and "logits" in results[row].error
        assert results[row].token_id == -1 and results[row].sequence_id == row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_barred_fails_alone(temperature: float) -> None:
    scores = torch.full((3, 4), -torch.inf)
    scores[:, 1:3] = torch.tensor([1.0, 0.5])
    barred = {"min_tokens": 1, "stop_ids": (1, 2)}
    sequences = [
        reference.make_sequence(0, temperature=temperature, top_k=1),
        reference.make_sequence(1, temperature=temperature, **barred),
        reference.make_sequence(2, temperature=temperature, min_tokens=1, stop_ids=(1,)),
    ]
    results = sample(scores, sequences)
    assert [result.token_id for result in results] == [1, -1, 2]
    assert results[1].error is not None and "min_tokens" in results[1].error
    (alone,) = sample(scores[1:2], sequences[1:2])
    assert alone == results[1]


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = logits(3)
    sequences = [
        reference.make_sequence(0, temperature=0.0, logprobs=5, logit_bias={9: 100.0}),
        reference.make_sequence(1, temperature=0.3, logprobs=0, top_k=3),
        reference.make_sequence(2, temperature=2.0),
    ]
    results = sample(scores, sequences)
    exact = scores.double().log_softmax(-1)
    ordered = reference.ordered(scores[0].numpy())
    assert results[0].token_id == 9
    assert results[0].logprob == pytest.approx(float(exact[0, 9]), abs=1e-5)
    assert results[0].rank == ordered.index(9) + 1
    assert list(results[0].top_ids) == ordered[:5]
    assert results[0].top_logprobs == pytest.approx(exact[0, ordered[:5]].tolist(), abs=1e-5)
    assert results[1].logprob is not None and results[1].top_ids == () and results[1].rank is not None
    assert results[2].logprob is None and results[2].rank is None


def test_more_logprobs_than_tokens_gives_all_tokens() -> None:
    (result,) = sample(logits(1, vocab=7), [reference.make_sequence(logprobs=20)])
    assert sorted(result.top_ids) == list(range(7))


def test_the_greedy_token_has_rank_one_and_leads_the_top_ids_even_when_tied() -> None:
    scores = torch.zeros(1, 500)
    scores[0, 200:300] = 1.0
    (result,) = sample(scores, [reference.make_sequence(temperature=0.0, logprobs=3)])
    assert (result.token_id, result.rank, result.top_ids) == (200, 1, (200, 201, 202))


@pytest.mark.parametrize("wish", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}], ids=str)
def test_logits_that_differ_in_rounding_give_the_same_tokens(wish: dict[str, Any]) -> None:
    """Tensor-parallel sums differ by about 1e-5 with the number of ranks."""
    scores = logits(300, vocab=1000)
    jitter = torch.rand(300, 1000, generator=torch.Generator().manual_seed(9)) * 2e-5 - 1e-5
    sequences = [reference.make_sequence(row, seed=row, temperature=0.8, **wish) for row in range(300)]
    one, other = tokens_of(sample(scores, sequences)), tokens_of(sample(scores + jitter, sequences))
    assert sum(a != b for a, b in zip(one, other, strict=True)) <= 1


def test_results_do_not_depend_on_the_thread_count() -> None:
    scores = logits(16, vocab=40000)
    wishes: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 9}, {"temperature": 0.0}] * 4
    sequences = [reference.make_sequence(row, seed=row, **wish) for row, wish in enumerate(wishes)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = sample(scores, sequences)
        torch.set_num_threads(3)
        assert sample(scores, sequences) == one
    finally:
        torch.set_num_threads(before)


def test_a_temperature_too_small_to_matter_is_greedy() -> None:
    scores = logits(2)
    sequences = [reference.make_sequence(row, temperature=t) for row, t in enumerate((1e-45, 1e-300))]
    assert tokens_of(sample(scores, sequences)) == scores.argmax(-1).tolist()


def test_no_sequences_give_no_results() -> None:
    assert sample(torch.empty(0, VOCAB), []) == ()


def test_values_beyond_float32_are_taken_as_its_extremes() -> None:
    """A top_p of 1e-300 keeps the most likely token; a temperature of 1e300 never draws a barred one."""
    logits = torch.zeros(1, 5)
    logits[0, 3] = 4.0
    narrow = SamplingSpec(temperature=1.0, top_p=1e-300, seed=1)
    assert [token.token_id for token in sample(logits, [_sequence(narrow)])] == [3]
    for seed in range(20):
        hot = SamplingSpec(temperature=1e300, seed=seed, min_tokens=5, stop_ids=(4,))
        (token,) = sample(logits, [_sequence(hot)])
        assert token.error is None and token.token_id != 4


def _sequence(spec: SamplingSpec) -> SequenceStep:
    return SequenceStep(
        sequence_id=1, start=0, token_ids=pack_ids([1]), block_ids=pack_ids([0]), sampling=spec
    )
