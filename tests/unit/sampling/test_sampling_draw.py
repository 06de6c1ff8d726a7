"""Drawing: the filters are transformers' warpers, the race is a draw from the softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sampling_reference as reference
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from shoal.messages import SamplingSpec
from shoal.sampling import noise, order
from shoal.sampling.draw import draw


def keys(count: int, seed: int = 5) -> torch.Tensor:
    return torch.tensor([noise.row_key(seed, 0, position) for position in range(count)], dtype=torch.int32)


def randn(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def transformers_race(scores: torch.Tensor, spec: SamplingSpec, row_keys: torch.Tensor) -> list[int]:
    """Full-vocabulary race over what transformers' warpers leave, in vLLM's order of filters."""
    no_ids = torch.empty(scores.shape[0], 0, dtype=torch.int64)
    scores = TemperatureLogitsWarper(spec.temperature)(no_ids, scores)
    if spec.min_p > 0:
        scores = MinPLogitsWarper(spec.min_p)(no_ids, scores)
    if spec.top_k > 0:
        scores = TopKLogitsWarper(spec.top_k)(no_ids, scores)
    if spec.top_p < 1:
        scores = TopPLogitsWarper(spec.top_p)(no_ids, scores)
    every = torch.arange(scores.shape[1], dtype=torch.int32)
    tokens: list[int] = (scores.softmax(-1) / noise.exponential(row_keys, every)).argmax(-1).tolist()
    return tokens


@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 700},
        {"top_k": 10**6},
        {"top_k": -1},
        {"top_p": 0.01},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 0.95, "temperature": 5.0},
        {"min_p": 0.2},
        {"min_p": 1e-4},
        {"min_p": 1.0},
        {"min_p": 1e-9, "temperature": 4.0},
        {"top_k": 30, "top_p": 0.6, "temperature": 1.7},
        {"top_k": 900, "top_p": 0.9, "min_p": 0.001, "temperature": 1.3},
        {"min_p": 0.01, "top_p": 0.8, "temperature": 3.0},
        {"min_p": 0.15, "top_p": 0.2, "temperature": 4.0},
    ],
    ids=str,
)
def test_filters_equal_transformers_and_need_no_full_noise(wish: dict[str, Any]) -> None:
    """Racing only the survivors gives the winner of the full race over transformers' filtered logits."""
    spec = SamplingSpec(**{"temperature": 1.0, **wish})
    scores = randn(64, 3000)
    expected_spec = (
        spec if spec.top_k <= 3000 else SamplingSpec(**{"temperature": 1.0, **wish, "top_k": 3000})
    )
    tokens = draw(scores, [spec] * 64, keys(64)).tolist()
    assert tokens == transformers_race(scores, expected_spec, keys(64))


@pytest.mark.parametrize(
    "wish", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str
)
def test_draws_follow_the_filtered_softmax(wish: dict[str, Any]) -> None:
    """Chi-square over many positions of one request."""
    count = 10000
    spec = SamplingSpec(**{"temperature": 1.0, **wish})
    row = randn(1, 30, scale=1.5, seed=1)
    tokens = draw(row.expand(count, -1), [spec] * count, keys(count)).numpy()
    left = reference.survivors(row[0].double().numpy(), spec)
    ids = np.array(list(left))
    probabilities = np.exp(list(left.values())) / np.exp(list(left.values())).sum()
    observed = np.bincount(tokens, minlength=30)
    assert observed.sum() == observed[ids].sum(), "a token that was filtered out was drawn"
    expected = probabilities * count
    common = expected >= 5
    statistic = float((((observed[ids] - expected) ** 2 / expected)[common]).sum())
    degrees = max(int(common.sum()) - 1, 1)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 5


@pytest.mark.parametrize("over", ["seed", "branch", "position"])
def test_consecutive_draws_are_independent(over: str) -> None:
    """Pairs of tokens at neighbouring seeds, branches or positions fill the product distribution."""
    count = 15000
    place = {"seed": 0, "branch": 1, "position": 2}[over]
    rows = [[3, 1, 9] for _ in range(count)]
    for step, row in enumerate(rows):
        row[place] = step
    row_keys = torch.tensor([noise.row_key(*row) for row in rows], dtype=torch.int32)
    scores = torch.tensor([[0.0, 0.5, 1.0, -0.5, 0.2, 0.0, -1.0, 0.7]])
    tokens = draw(scores.expand(count, -1), [SamplingSpec(temperature=1.0)] * count, row_keys).numpy()
    probabilities = scores[0].softmax(-1).double().numpy()
    expected = np.outer(probabilities, probabilities) * (count - 1)
    observed = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64).reshape(8, 8)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert abs(statistic - 63) < 5 * math.sqrt(2 * 63)


def test_ties_at_the_cut_keep_the_lowest_ids() -> None:
    scores = torch.zeros(500, 400)
    top_k = draw(scores, [SamplingSpec(temperature=1.0, top_k=3)] * 500, keys(500))
    assert set(top_k.tolist()) == {0, 1, 2}
    top_p = draw(scores, [SamplingSpec(temperature=1.0, top_p=0.0099)] * 500, keys(500))
    assert set(top_p.tolist()) == {0, 1, 2, 3}


def test_rows_are_widened_each_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaked: not at all. Half the vocabulary: at once to all of it. Some hundreds: to the next width."""
    widths: list[tuple[int, int]] = []
    largest = order.largest

    def noted(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        widths.append((scores.shape[0], k))
        return largest(scores, k)

    monkeypatch.setattr(order, "largest", noted)
    scores = torch.zeros(3, 40_000)
    scores[0, 7] = 30.0
    scores[2, :500] = 20.0
    tokens = draw(scores, [SamplingSpec(temperature=1.0, top_p=0.6)] * 3, keys(3)).tolist()
    assert sorted(widths) == [(1, 2048), (1, 40_000), (3, 256)]
    assert tokens[0] == 7 and tokens[1] < 24_000 and tokens[2] < 300


def test_an_exact_sum_reaches_top_p() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(200, -1)
    for top_p, left in ((0.5, {0}), (0.51, {0, 1}), (0.75, {0, 1}), (0.76, {0, 1, 2})):
        tokens = draw(scores, [SamplingSpec(temperature=1.0, top_p=top_p)] * 200, keys(200))
        assert set(tokens.tolist()) == left


@pytest.mark.parametrize(
    "wish", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}], ids=str
)
def test_the_narrowest_filter_is_greedy(wish: dict[str, Any]) -> None:
    scores = randn(50, 2000)
    tokens = draw(scores, [SamplingSpec(**{"temperature": 1.0, **wish})] * 50, keys(50))
    assert torch.equal(tokens, scores.argmax(-1))


@pytest.mark.parametrize("wish", [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_extreme_logits_neither_overflow_nor_draw_barred_tokens(wish: dict[str, Any]) -> None:
    scores = torch.full((40, 300), -torch.inf)
    scores[:, 7] = 3e38
    scores[:20, 9] = -3e38
    tokens = draw(scores, [SamplingSpec(**{"temperature": 1e-4, **wish})] * 40, keys(40))
    assert tokens.tolist() == [7] * 40


def test_the_given_scores_are_not_changed() -> None:
    scores = randn(4, 300)
    before = scores.clone()
    wishes: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
    draw(scores, [SamplingSpec(temperature=0.5, **wish) for wish in wishes], keys(4))
    assert torch.equal(scores, before)
