"""Deals one token budget out, step by step. Knows no model, no text and no clock.

``schedule()`` says what the next step computes, ``update()`` takes its answer in. One step is in
flight at a time; ``add``, ``abort`` and ``finish`` may come at any moment, also in between: blocks
a step in flight may still write are freed when it is answered.

Why everything ends. Running branches are served in order of arrival, and when blocks run out the
youngest gives its blocks up. A branch whose whole sequence cannot fit is refused or capped, so the
oldest running branch always gets what it needs and finishes; then the next is the oldest. Who waits
is admitted in order of arrival and only with blocks for all its tokens, so no one is passed by
because it is large. (Branches that wait for their leader's prompt let others pass meanwhile.)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from shoal.cache.manager import CacheManager, SequenceBlocks
from shoal.errors import QueueFullError, RequestError
from shoal.messages import Step, StepResult, TokenResult
from shoal.sched.intake import Limits, make_branches
from shoal.sched.queue import WaitingQueue
from shoal.sched.request import BranchUpdate, Request, RequestSpec, Status

__all__ = ["Scheduler", "SchedulerStats"]

_arrival = attrgetter("sequence_id")
_Share = tuple[Request, int]  # a branch and how many tokens it computes in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges now, and counters since the start. Running and waiting count branches."""

    num_running: int
    num_waiting: int
    cache_usage: float  # share of blocks held, 0 to 1
    num_prefix_queries: int  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int  # of these, found
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was handed out and not answered yet."""

    step: Step
    shares: list[_Share]


class Scheduler:
    """Continuous batching over one :class:`CacheManager`.

    Args:
        cache: the blocks; nobody else changes it.
        max_num_seqs: branches running at once.
        max_num_batched_tokens: tokens computed in one step.
        max_model_len: tokens of one sequence, prompt and output.
        max_num_queued_requests: requests that may wait beyond those the next step has room for;
            None: no bound.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_queued_requests: int | None = None,
    ) -> None:
        assert max_num_seqs >= 1 and max_num_batched_tokens >= 1 and max_model_len >= 1
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._limits = Limits(max_model_len, cache.num_blocks, cache.block_size)
        self._max_num_queued_requests = max_num_queued_requests
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # in order of arrival
        self._branches: dict[str, dict[int, Request]] = {}  # unfinished, by request id and sequence id
        self._requests: dict[int, Request] = {}  # unfinished, by sequence id
        self._flight: _Flight | None = None
        self._unfreed: list[Request] = []  # finished while their step was in flight
        self._is_backlogged = False  # the last step had no room for someone
        self._next_sequence_id = 0
        self._next_step_id = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._num_preemptions = 0

    @property
    def num_unfinished(self) -> int:
        """Branches running or waiting."""
        return len(self._requests)

    @property
    def stats(self) -> SchedulerStats:
        """How it stands."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            cache_usage=self._cache.usage,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
            num_preemptions=self._num_preemptions,
        )

    def add(self, spec: RequestSpec) -> list[Request]:
        """Take a request in, behind those that wait.

        Returns:
            its branches; the first is the one whose ``num_cached`` counts for the request's usage.

        Raises:
            RequestError: it could never be served; ``field`` names why. Nothing has changed.
            QueueFullError: too many requests wait. Nothing has changed.
        """
        if spec.request_id in self._branches:
            raise RequestError(f"request_id: {spec.request_id!r} is still being served", field="request_id")
        branches = make_branches(spec, self._next_sequence_id, self._limits)
        self._require_room_to_wait()
        self._next_sequence_id += len(branches)
        self._branches[spec.request_id] = {request.sequence_id: request for request in branches}
        for request in branches:
            self._requests[request.sequence_id] = request
            self._waiting.append(request)
        return branches

    def schedule(self) -> Step | None:
        """The next step, or None if there is nothing to do. The step is in flight until ``update``."""
        assert self._flight is None, "the last step was not answered yet"
        shares: list[_Share] = []
        budget = self._deal_to_running(shares)
        self._is_backlogged = self._deal_to_waiting(shares, budget)
        if not shares:
            assert not self._requests, "there is work, and none of it can be done"
            return None
        step = Step(
            step_id=self._next_step_id,
            sequences=tuple([request.step(count) for request, count in shares]),
        )
        self._next_step_id += 1
        self._flight = _Flight(step, shares)
        return step

    def update(self, step: Step, result: StepResult) -> list[BranchUpdate]:
        """Take the answer to the step in flight in.

        Returns:
            what is new, for the branches that got a token or ended; not for those that ended while
            the step was in flight.
        """
        flight = self._flight
        assert flight is not None and flight.step.step_id == step.step_id == result.step_id, (
            f"answer {result.step_id} to step {step.step_id}, which is not in flight"
        )
        self._flight = None
        for request in self._unfreed:
            self._cache.free(request.blocks)
        self._unfreed.clear()
        tokens = {token.sequence_id: token for token in result.tokens}
        updates = []
        for request, count in flight.shares:
            if request.status is Status.RUNNING:
                update = self._advance(request, count, tokens.get(request.sequence_id))
                if update is not None:
                    updates.append(update)
        if any(update.finish_reason for update in updates):
            self._running = [request for request in self._running if request.status is Status.RUNNING]
        return updates

    def abort(self, request_id: str) -> list[Request]:
        """End all branches of a request, whatever they are doing.

        Returns:
            the branches that had not finished before; none if the request is unknown.
        """
        branches = list(self._branches.get(request_id, {}).values())
        for request in branches:
            self._withdraw(request, "abort", None)
        return branches

    def finish(self, sequence_id: int, reason: str, stop_reason: int | str | None = None) -> bool:
        """End one branch for a reason found outside, such as a stop string in its text.

        Returns:
            whether it had not finished before.
        """
        request = self._requests.get(sequence_id)
        if request is None:
            return False
        self._withdraw(request, reason, stop_reason)
        return True

    def reset(self) -> None:
        """The pages are gone: forget the step in flight and every prefix, and compute all anew.

        Running branches wait again in order of arrival; their tokens stay. An answer to the forgotten
        step must not be handed in any more.
        """
        self._flight = None
        self._unfreed.clear()
        self._cache.reset()
        while self._running:
            self._requeue(self._running.pop())

    def check_integrity(self) -> None:
        """Assert that queue, running list, tables and blocks agree."""
        running = self._running
        assert running == sorted(running, key=_arrival), "the running branches are out of order"
        assert len(running) <= self._max_num_seqs
        assert all(request.status is Status.RUNNING for request in running)
        assert len(running) + len(self._waiting) == len(self._requests)
        by_request = [request for group in self._branches.values() for request in group.values()]
        assert {id(request) for request in by_request} == {id(r) for r in self._requests.values()}
        assert self._flight is not None or not self._unfreed, "blocks were left with finished branches"
        for request in self._requests.values():
            held = len(request.blocks.block_ids) * self._cache.block_size
            assert request.num_computed <= held and request.num_computed < request.num_tokens
            assert (request.status is Status.RUNNING) == bool(held), "who waits holds nothing, who runs does"
        self._waiting.check_integrity()
        self._cache.check_integrity(self._holders())

    def _holders(self) -> Iterator[SequenceBlocks]:
        for request in (*self._running, *self._unfreed):
            yield request.blocks

    def _require_room_to_wait(self) -> None:
        bound = self._max_num_queued_requests
        if bound is None:
            return
        num_idle = 0 if self._is_backlogged else self._max_num_seqs - len(self._running)
        num_queued = min(self._waiting.num_requests, len(self._waiting) - num_idle)
        if num_queued >= bound:
            raise QueueFullError(f"{num_queued} requests wait already (max_num_queued_requests is {bound})")

    # Dealing a step out

    def _deal_to_running(self, shares: list[_Share]) -> int:
        """Serve the running, oldest first; returns the budget left.

        Who is preempted is first in line again. What it gave up, less a block, is too little for it to
        come back in the same step, unless others have computed its prefix meanwhile.
        """
        budget = self._max_num_batched_tokens
        running = self._running
        grow = self._cache.grow
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            start = request.num_computed
            count = min(len(request.token_ids) - start, budget)
            if not grow(request.blocks, start + count):
                assert len(running) > 1, "a branch alone does not fit, and was let in"
                self._preempt(running.pop())  # the youngest: perhaps this very one
                continue
            shares.append((request, count))
            budget -= count
            index += 1
        return budget

    def _deal_to_waiting(self, shares: list[_Share], budget: int) -> bool:
        """Let in who waits, in order; returns whether someone was held back for lack of room."""
        waiting = self._waiting
        passed: list[Request] = []
        is_held_back = False
        while waiting:
            if budget == 0 or len(self._running) >= self._max_num_seqs:
                is_held_back = True
                break
            request = waiting.popleft()
            if _waits_for_leader(request):
                passed.append(request)
                continue
            if not self._admit(request):
                waiting.push_front(request)
                is_held_back = True
                break
            count = min(request.num_tokens - request.num_computed, budget)
            shares.append((request, count))
            budget -= count
        for request in reversed(passed):
            waiting.push_front(request)
        return is_held_back

    def _admit(self, request: Request) -> bool:
        """Start a branch on what is cached, if there are blocks for all its tokens."""
        cache = self._cache
        leader = request.leader
        prefix = cache.lookup(request.blocks)
        if leader is not None and leader.status is Status.RUNNING and prefix.num_tokens < request.num_shared:
            prefix = cache.fork(leader.blocks, request.num_shared)
        if not cache.admit(request.blocks, prefix, request.num_tokens):
            return False
        request.num_computed = prefix.num_tokens
        request.status = Status.RUNNING
        if request.num_cached is None:
            request.num_cached = prefix.num_tokens
            if leader is None and cache.enable_prefix_caching:
                self._num_prefix_queries += request.num_prompt
                self._num_prefix_hits += prefix.num_tokens
        insort(self._running, request, key=_arrival)
        return True

    def _preempt(self, request: Request) -> None:
        self._cache.free(request.blocks)
        self._requeue(request)
        request.num_preemptions += 1
        self._num_preemptions += 1

    def _requeue(self, request: Request) -> None:
        request.status = Status.WAITING
        request.num_computed = 0
        self._waiting.put_back(request)

    # Taking an answer in

    def _advance(self, request: Request, count: int, token: TokenResult | None) -> BranchUpdate | None:
        """Account for one branch's share of an answered step."""
        if token is not None and token.error is not None:
            return self._fail(request, token.error)
        num_computed = request.num_computed + count
        if num_computed < len(request.token_ids):
            request.num_computed = num_computed
            self._cache.commit(request.blocks, num_computed)
            return None
        if token is None:
            return self._fail(request, "the step's answer has no token for this branch")
        request.num_computed = num_computed
        self._cache.commit(request.blocks, num_computed)
        request.token_ids.append(token.token_id)
        end = request.end()
        if end is None:
            return BranchUpdate(request, token)
        self._close(request, *end)
        self._cache.free(request.blocks)
        return BranchUpdate(request, token, *end)

    def _fail(self, request: Request, error: str) -> BranchUpdate:
        self._close(request, "error", None)
        self._cache.free(request.blocks)
        return BranchUpdate(request, None, "error", None, error)

    def _withdraw(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """End a branch from outside a step."""
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            if self._flight is None:
                self._cache.free(request.blocks)
            else:
                self._unfreed.append(request)
        self._close(request, reason, stop_reason)

    def _close(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        del self._requests[request.sequence_id]
        group = self._branches[request.request_id]
        del group[request.sequence_id]
        if not group:
            del self._branches[request.request_id]


def _waits_for_leader(request: Request) -> bool:
    """Whether the leader is still to compute, or computing, what this branch will share."""
    leader = request.leader
    return (
        leader is not None
        and leader.status is not Status.FINISHED
        and leader.num_computed < request.num_shared
    )
