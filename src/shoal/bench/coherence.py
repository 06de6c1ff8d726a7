"""When two runs count as giving the same tokens (docs/architecture.md, "What equal means"). Knows no engine:
who asks brings what goes on from given ids and how far apart two tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["LOG_LIKELIHOOD", "TIE", "Difference", "Gap", "Resume", "follow", "most_that_may_differ"]

TIE = 1e-3  # two scores this close may trade places in float32
LOG_LIKELIHOOD = 1e-4  # mean natural log-likelihood a token may move by between rank counts

Resume = Callable[[int], Sequence[int]]
"""The run under test from the reference's first so many output ids to the end: the ids that follow."""

Gap = Callable[[int, int, int], float]
"""(position in the output, the reference's token, the other) to how far apart the reference scores them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where a run left its reference."""

    position: int  # in the output
    wanted: int | None  # the reference's token; None: the reference had ended
    got: int | None
    gap: float  # between the reference's scores of the two; inf where one of them is missing

    @property
    def is_tie(self) -> bool:
        """Rounding may have decided here."""
        return self.gap <= TIE


def follow(want: Sequence[int], have: Sequence[int], resume: Resume, gap: Gap) -> list[Difference]:
    """Where a run left its reference. After a tie the comparison goes on from the reference's own ids; what
    is no tie ends it, and stands last.

    Args:
        want: the reference's output ids.
        have: those of the run under test.
        resume: called after a tie.
        gap: called at each difference.
    """
    found: list[Difference] = []
    start, rest, have = 0, list(want), list(have)
    while have != rest:
        common = min(len(have), len(rest))
        at = next((i for i in range(common) if have[i] != rest[i]), common)
        wanted = rest[at] if at < len(rest) else None
        got = have[at] if at < len(have) else None
        distance = math.inf if wanted is None or got is None else gap(start + at, wanted, got)
        found.append(Difference(start + at, wanted, got, distance))
        start += at + 1
        rest = list(want[start:])
        if not found[-1].is_tie or not rest:
            break
        have = list(resume(start))
    return found


def most_that_may_differ(num_requests: int) -> int:
    """How many requests may differ at all, at ties."""
    return num_requests // 100
