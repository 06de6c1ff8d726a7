"""Beam search, as transformers does it: which continuations of a request's beams go on, which have ended, and
when the search is over. Knows no blocks, no queue and no step.

A beam is a branch. When all beams of a group have their candidates, :meth:`BeamGroup.choose` says which beam
goes on with which token; several may go on from one, and some from none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.messages import TokenResult

if TYPE_CHECKING:
    from shoal.sched.request import Request

__all__ = ["BeamGroup", "BeamSpec", "Finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSpec:
    """What a caller wants of a search. The names are transformers'."""

    num_beams: int
    num_returned: int  # sequences, at most num_beams
    length_penalty: float = 1.0  # the exponent of the length that a sum of log-probabilities is divided by
    early_stopping: bool | str = False  # True: end with num_beams sequences; "never": when none can be better


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that has ended."""

    score: float  # its log-probability, by length
    token_ids: tuple[int, ...]  # of the output
    is_stopped: bool  # by an ending token, not by its length

    def end(self, eos_ids: frozenset[int]) -> tuple[str, int | None]:
        """Finish reason and stop reason."""
        if not self.is_stopped:
            return "length", None
        return "stop", None if self.token_ids[-1] in eos_ids else self.token_ids[-1]


class BeamGroup:
    """One request's beams.

    Args:
        branches: as many as beams; the first has the prompt, the others stay parked until they are needed.
        ending_ids: tokens that end a sequence.
        max_tokens: of the output.
    """

    def __init__(
        self, spec: BeamSpec, branches: Sequence[Request], ending_ids: frozenset[int], max_tokens: int
    ) -> None:
        self.spec = spec
        self.branches = list(branches)
        self.error: str | None = None
        self._beams = [(branches[0], 0.0)]  # with their scores, the best first
        self._ending_ids = ending_ids
        self._max_tokens = max_tokens
        self._candidates: dict[int, TokenResult] = {}  # by sequence id
        self._finished: list[Finished] = []  # the best first
        self._scores: list[float] = []  # of what was chosen last

    @staticmethod
    def num_candidates(num_beams: int, num_ending_ids: int) -> int:
        """How many of a beam's most likely tokens a choice needs: enough are left if some end."""
        return max(2, 1 + num_ending_ids) * num_beams

    def take(self, request: Request, token: TokenResult) -> None:
        """A beam's candidates: ``top_ids`` and ``top_logprobs``."""
        self._candidates[request.sequence_id] = token

    @property
    def is_complete(self) -> bool:
        """Whether every beam has its candidates, or one failed."""
        return self.error is not None or len(self._candidates) == len(self._beams)

    def choose(self) -> list[tuple[Request, int]]:
        """Which beams go on with which tokens, the best first; none when the search is over.

        Those who go on are named by :meth:`go_on`.
        """
        num_beams = self.spec.num_beams
        extended = [
            (score + logprob, request, token_id)
            for request, score in self._beams
            for token_id, logprob in self._pairs(request)
        ]
        self._candidates.clear()
        extended.sort(key=lambda entry: -entry[0])
        extended = extended[: self.num_candidates(num_beams, len(self._ending_ids))]
        num_output = self._beams[0][0].num_output + 1
        is_last = num_output >= self._max_tokens
        self._keep(
            Finished(
                score / num_output**self.spec.length_penalty,
                (*request.output_ids, token_id),
                token_id in self._ending_ids,
            )
            for score, request, token_id in extended[:num_beams]
            if is_last or token_id in self._ending_ids
        )
        going = [entry for entry in extended if not is_last and entry[2] not in self._ending_ids][:num_beams]
        if not going or self._is_over(going[0][0], num_output):
            return []
        self._scores = [score for score, _, _ in going]
        return [(request, token_id) for _, request, token_id in going]

    def go_on(self, beams: Sequence[Request]) -> None:
        """The branches that have what was chosen, in its order."""
        self._beams = list(zip(beams, self._scores, strict=True))

    @property
    def finished(self) -> list[Finished]:
        """The sequences asked for, the best first, once the search is over."""
        best = self._finished[: self.spec.num_returned]
        # Fewer have ended only where fewer could: forced tokens leave one sequence to find.
        return best + best[-1:] * (self.spec.num_returned - len(best))

    def _pairs(self, request: Request) -> Iterator[tuple[int, float]]:
        token = self._candidates[request.sequence_id]
        return zip(token.top_ids, token.top_logprobs, strict=True)

    def _keep(self, ended: Iterable[Finished]) -> None:
        """The best ones so far, as many as beams; of equals, who was first."""
        self._finished += ended
        self._finished.sort(key=lambda sequence: -sequence.score)
        del self._finished[self.spec.num_beams :]

    def _is_over(self, best_score: float, num_output: int) -> bool:
        """Whether no beam, the best of which has ``best_score``, can lead to a better sequence."""
        spec = self.spec
        if len(self._finished) < spec.num_beams:
            return False
        if spec.early_stopping is True:
            return True
        is_longer_better = spec.early_stopping == "never" and spec.length_penalty > 0
        length = float(self._max_tokens if is_longer_better else num_output)
        best_possible: float = best_score / length**spec.length_penalty
        return best_possible <= self._finished[-1].score
