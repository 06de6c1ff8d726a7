"""Beam search, as transformers does it: which continuations of a request's beams go on, which have ended, and
when the search is over. Knows no blocks, no queue, no step, and text only by a question that it asks.

A beam is a branch. When all beams of a group have their candidates, :meth:`BeamGroup.choose` says which beam
goes on with which token; several may go on from one, and some from none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from shoal.messages import TokenResult

if TYPE_CHECKING:
    from shoal.sched.request import Request

__all__ = ["BeamGroup", "BeamSpec", "Finished"]


_NONE_LEFT = "no token is left to go on with: logit_bias, min_tokens or no_repeat_ngram_size bar them all"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSpec:
    """What a caller wants of a search. The names are transformers'."""

    num_beams: int
    num_returned: int  # sequences, at most num_beams
    length_penalty: float = 1.0  # the exponent of the length that a sum of log-probabilities is divided by
    early_stopping: bool | str = False  # True: end with num_beams sequences; "never": when none can be better
    find_stop: Callable[[Sequence[int]], str | None] | None = None  # the stop string in which an output ends


class _Link(NamedTuple):
    """A beam's last token, behind those before it, which it shares with other beams."""

    before: _Link | None
    token_id: int
    logprob: float  # that the search added up
    candidates: TokenResult  # among which it was


class _Step(NamedTuple):
    """A beam with one more token."""

    score: float
    request: Request
    link: _Link


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that has ended."""

    score: float  # its log-probability, by length
    last: _Link
    stop: str | None  # the stop string that ended it
    is_stopped: bool  # by that or by an ending token, not by its length

    def end(self, eos_ids: frozenset[int]) -> tuple[str, int | str | None]:
        """Finish reason and stop reason."""
        if not self.is_stopped:
            return "length", None
        if self.stop is not None:
            return "stop", self.stop
        return "stop", None if self.last.token_id in eos_ids else self.last.token_id

    def tokens(self, sequence_id: int) -> list[TokenResult]:
        """The output, token by token, with what the search knew of each."""
        links: list[_Link] = []
        link: _Link | None = self.last
        while link is not None:
            links.append(link)
            link = link.before
        return [
            TokenResult(
                sequence_id=sequence_id,
                token_id=link.token_id,
                logprob=link.logprob,
                rank=link.candidates.top_ids.index(link.token_id) + 1,
                top_ids=link.candidates.top_ids,
                top_logprobs=link.candidates.top_logprobs,
            )
            for link in reversed(links)
        ]


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
        # With their scores and what they consist of, the best first.
        self._beams: list[tuple[Request, float, _Link | None]] = [(branches[0], 0.0, None)]
        self._ending_ids = ending_ids
        self._max_tokens = max_tokens
        self._candidates: dict[int, TokenResult] = {}  # by sequence id
        self._finished: list[Finished] = []  # the best first
        self._chosen: list[_Step] = []  # last

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
        num_beams, length_penalty = self.spec.num_beams, self.spec.length_penalty
        num_output = self._beams[0][0].num_output + 1
        is_last = num_output >= self._max_tokens
        going: list[_Step] = []
        ended: list[Finished] = []
        for place, step in enumerate(self._best()):
            stop = self._stop(step)
            is_stopped = stop is not None or step.link.token_id in self._ending_ids
            if not is_stopped and not is_last:
                going.append(step)
            elif place < num_beams:
                ended.append(Finished(step.score / num_output**length_penalty, step.link, stop, is_stopped))
        self._candidates.clear()
        self._keep(ended)
        if not going or self._is_over(going[0].score, num_output):
            if not self._finished:
                self.error = _NONE_LEFT
            return []
        self._chosen = going[:num_beams]
        return [(step.request, step.link.token_id) for step in self._chosen]

    def go_on(self, beams: Sequence[Request]) -> None:
        """The branches that have what was chosen, in its order."""
        chosen = zip(beams, self._chosen, strict=True)
        self._beams = [(beam, step.score, step.link) for beam, step in chosen]

    @property
    def finished(self) -> list[Finished]:
        """The sequences asked for, the best first, once the search is over."""
        best = self._finished[: self.spec.num_returned]
        # Fewer have ended only where fewer could: forced tokens leave one sequence to find.
        return best + best[-1:] * (self.spec.num_returned - len(best))

    def _best(self) -> Iterator[_Step]:
        """The best of all beams with their candidates; of equals, the better beam's, then the more likely."""
        extended = merge(*(self._extended(*beam) for beam in self._beams), key=lambda step: -step.score)
        return islice(extended, self.num_candidates(self.spec.num_beams, len(self._ending_ids)))

    def _extended(self, request: Request, score: float, link: _Link | None) -> Iterator[_Step]:
        """A beam with each of its candidates, the most likely first."""
        candidates = self._candidates[request.sequence_id]
        for token_id, logprob in zip(candidates.top_ids, candidates.top_logprobs, strict=True):
            yield _Step(score + logprob, request, _Link(link, token_id, logprob, candidates))

    def _stop(self, step: _Step) -> str | None:
        if self.spec.find_stop is None:
            return None
        return self.spec.find_stop([*step.request.output_ids, step.link.token_id])

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
