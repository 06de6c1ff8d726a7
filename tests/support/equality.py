"""When two runs count as giving the same tokens (docs/architecture.md, "What equal means")."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

TIE = 1e-3  # two scores this close may trade places in float32

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
    assert differing <= len(prompts) / 100, f"{differing} of {len(prompts)} requests differ"
    return differing


def _check_one(prompt: list[int], want: list[int], have: list[int], resume: Resume, scores: Scores) -> bool:
    start, differs = 0, False
    while have != want[start:]:
        assert len(have) == len(want) - start, f"{len(have)} tokens instead of {len(want) - start}"
        at = next(i for i, pair in enumerate(zip(have, want[start:], strict=True)) if pair[0] != pair[1])
        row = scores(prompt + want[: start + at])
        gap = abs(float(row[have[at]] - row[want[start + at]]))
        assert gap <= TIE, f"token {start + at}: {have[at]} instead of {want[start + at]}, {gap:.2e} apart"
        differs = True
        start += at + 1
        have = resume(prompt + want[:start], len(want) - start) if start < len(want) else []
    return differs
