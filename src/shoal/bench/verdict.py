"""Whether contenders compute the same thing: their ids, and what they think of the reference's ids. Knows
:mod:`.coherence`'s rule and asks engines for scores; knows no speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.bench.coherence import LOG_LIKELIHOOD, Difference, follow, most_that_may_differ
from shoal.bench.contender import Contender, EngineContender, Ran
from shoal.sampling_params import SamplingParams

__all__ = ["Agreement", "Likelihood", "Round", "agreement", "likelihood"]

_MOST_POSITIONS = 64  # of one workload whose tokens are scored


@dataclass(frozen=True, slots=True)
class Round:
    """One round's prompts, their sampling, and what the reference answered."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    reference: Ran


@dataclass(frozen=True, slots=True)
class Agreement:
    """A run's ids beside the reference's."""

    requests: int  # branches count one each
    differing: int
    ties: int  # differences that rounding may have made
    first: Difference | None  # the first that is no tie, else the first of all
    first_request: int | None = None

    @property
    def is_equal(self) -> bool:
        """By the project's rule: every difference a tie, and at most 1% of the requests differ."""
        only_ties = self.first is None or self.first.is_tie
        return only_ties and self.differing <= most_that_may_differ(self.requests)


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Mean natural log-likelihood of the reference's tokens, teacher-forced, by two engines."""

    positions: int
    reference: float
    other: float

    @property
    def is_equal(self) -> bool:
        return abs(self.other - self.reference) <= LOG_LIKELIHOOD


def agreement(
    reference: EngineContender, other: Contender, rounds: Sequence[Round], runs: Sequence[Ran]
) -> Agreement:
    """Hold ``other``'s runs, one a round, against the reference's."""
    requests = differing = ties = 0
    first: Difference | None = None
    first_request: int | None = None
    for asked, got in zip(rounds, runs, strict=True):
        for index, branches in enumerate(asked.reference.ids):
            for branch, want in enumerate(branches):
                requests += 1
                have = got.ids[index][branch]
                found = _Judge(reference, other, asked, index, branch).differences(want, have)
                differing += bool(found)
                ties += sum(place.is_tie for place in found)
                if found and (first is None or (first.is_tie and not found[-1].is_tie)):
                    first, first_request = found[-1], index
    return Agreement(requests, differing, ties, first, first_request)


def likelihood(reference: EngineContender, other: EngineContender, asked: Round) -> Likelihood:
    """Score the reference's tokens by both engines, at up to 64 places spread over the requests."""
    places = [
        (index, position)
        for index, branches in enumerate(asked.reference.ids)
        for position in range(len(branches[0]))
    ]
    places = places[:: max(1, -(-len(places) // _MOST_POSITIONS))]
    contexts = [asked.prompts[i] + asked.reference.ids[i][0][:position] for i, position in places]
    tokens = [asked.reference.ids[i][0][position] for i, position in places]
    means = [
        math.fsum(engine.log_probabilities(contexts, tokens)) / len(places) for engine in (reference, other)
    ]
    return Likelihood(len(places), *means)


class _Judge:
    """One branch of one request."""

    def __init__(
        self, reference: EngineContender, other: Contender, asked: Round, index: int, branch: int
    ) -> None:
        self._reference, self._other = reference, other
        self._prompt = asked.prompts[index]
        self._params = asked.params[index]
        self._want = asked.reference.ids[index][branch]
        self._branch = branch

    def differences(self, want: Sequence[int], have: Sequence[int]) -> list[Difference]:
        return follow(want, have, self._resume, self._gap)

    def _resume(self, start: int) -> list[int]:
        """The other run from ``start`` of the reference's ids. Noise depends on a token's place in the
        sequence, so the same seed draws the same."""
        params = replace(self._params, max_tokens=len(self._want) - start)
        ran = self._other.run([self._prompt + self._want[:start]], [params])
        return ran.ids[0][self._branch]

    def _gap(self, position: int, wanted: int, other: int) -> float:
        context = self._prompt + self._want[:position]
        scores = self._reference.log_probabilities([context, context], [wanted, other])
        temperature = self._params.temperature or 0.0
        if temperature:
            noise = self._log_noise(len(context), (wanted, other))
            scores = [s / temperature - n for s, n in zip(scores, noise, strict=True)]
        return abs(scores[0] - scores[1])

    def _log_noise(self, place: int, tokens: tuple[int, int]) -> list[float]:
        """The logarithm of what the sampler divides each token's probability by."""
        import torch

        from shoal.sampling.noise import exponential, row_key

        seed = self._params.seed
        assert seed is not None, "a workload seeds its prompts"
        keys = torch.tensor([row_key(seed, self._branch, place)], dtype=torch.int32)
        drawn: list[float] = exponential(keys, torch.tensor(tokens, dtype=torch.int32))[0].log().tolist()
        return drawn
