"""When two runs count as giving the same tokens (docs/architecture.md, "What equal means"), for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.bench.coherence import follow, most_that_may_differ

Resume = Callable[[list[int], int], list[int]]
"""The run under test: (prompt ids, how many tokens) to token ids."""

Scores = Callable[[list[int]], torch.Tensor]
"""The reference's scores [vocabulary] of the token after some ids."""


def assert_same_tokens(
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    resume: Resume,
    scores: Scores,
) -> int:
    """Hold a run against its reference.

    Ids must be equal. Where they first differ, the reference's scores of the two tokens must be a tie, and
    the comparison goes on from the reference's own ids. At most 1% of the requests may differ at all.

    Returns:
        how many requests differed.
    """
    differing = 0
    for prompt, want, have in zip(prompts, expected, got, strict=True):
        differing += _check_one(list(prompt), list(want), list(have), resume, scores)
    print(f"{differing} of {len(prompts)} requests differ")
    assert differing <= most_that_may_differ(len(prompts)), f"{differing} of {len(prompts)} requests differ"
    return differing


def _check_one(prompt: list[int], want: list[int], have: list[int], resume: Resume, scores: Scores) -> bool:
    def gap(position: int, wanted: int, other: int) -> float:
        row = scores(prompt + want[:position])
        return abs(float(row[other] - row[wanted]))

    assert len(have) == len(want), f"{len(have)} tokens instead of {len(want)}"
    found = follow(want, have, lambda start: resume(prompt + want[:start], len(want) - start), gap)
    for place in found:
        assert place.is_tie, (
            f"token {place.position}: {place.got} instead of {place.wanted}, {place.gap:.2e} apart"
        )
    return bool(found)
