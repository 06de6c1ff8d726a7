"""One total order of tokens: greater logit first, lower id first among equals."""

from __future__ import annotations

import numpy as np
import pytest
import sampling_reference as reference
import torch

from shoal.sampling import order


def rounded(rows: int, vocab: int, step: float, seed: int = 0) -> torch.Tensor:
    """Logits with many ties, as bf16 gives."""
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (scores / step).round() * step


@pytest.mark.parametrize("step", [1e-6, 0.05, 1.0, 100.0])
@pytest.mark.parametrize("k", [1, 2, 50, 399, 400, 1000])
def test_largest_is_the_first_k_of_the_stable_order(step: float, k: int) -> None:
    scores = rounded(8, 400, step)
    values, ids = order.largest(scores, k)
    for row in range(8):
        assert ids[row].tolist() == reference.ordered(scores[row].numpy())[:k]
    assert torch.equal(values, scores.gather(1, ids))


@pytest.mark.parametrize("step", [1e-6, 0.5, 100.0])
@pytest.mark.parametrize("k", [1024, 2000, 3000])
def test_many_are_in_the_same_order(step: float, k: int) -> None:
    """Zeros of both signs are equal, and what is barred comes last."""
    scores = rounded(4, 3000, step)
    scores[:, ::3] *= 0.0
    scores[1] = -scores[1].abs()
    scores[2, 5:] = -torch.inf
    before = scores.clone()
    values, ids = order.largest(scores, k)
    for row in (0, 1, 3):
        assert ids[row].tolist() == reference.ordered(scores[row].numpy())[:k]
    assert sorted(ids[2, :5].tolist()) == [0, 1, 2, 3, 4] and (values[2, 5:] == -torch.inf).all()
    assert torch.equal(values, scores.gather(1, ids)) and torch.equal(scores, before)


def test_largest_lists_finite_tokens_before_barred_ones() -> None:
    scores = torch.full((2, 500), -torch.inf)
    scores[0, 400], scores[0, 3], scores[1, 7] = 1.0, 1.0, -5.0
    values, ids = order.largest(scores, 10)
    assert ids[0, :2].tolist() == [3, 400] and ids[1, 0].item() == 7
    assert (values[:, 2:] == -torch.inf).all()


@pytest.mark.parametrize("step", [1e-6, 1.0])
def test_rank_is_the_place_in_that_order(step: float) -> None:
    scores = rounded(6, 300, step)
    tokens = torch.tensor([0, 5, 100, 200, 298, 299])
    ranks = order.ranks(scores, tokens).tolist()
    expected = [reference.ordered(scores[r].numpy()).index(int(t)) + 1 for r, t in enumerate(tokens)]
    assert ranks == expected
    assert order.ranks(scores, scores.argmax(-1)).tolist() == [1] * 6, np.asarray(scores)
