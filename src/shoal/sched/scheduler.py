"""Deals one token budget out, step by step. Knows no model, no text and no clock.

``schedule()`` says what the next step computes, ``update()`` takes its answer in. Up to two steps are in
flight, answered in order. A branch whose next token the first of them samples computes a placeholder for
it in the second; if it ends with that token, what the second says of it is dropped. Who is sure to end is
left out. ``add``, ``abort`` and ``finish`` may come at any moment, also in between: blocks a step in
flight may still write are freed when it is answered.

Why everything ends. Running branches are served in order of arrival, and when blocks run out the
youngest gives its blocks up. A branch whose whole sequence cannot fit is refused or capped, so the
oldest running branch always gets what it needs and finishes; then the next is the oldest. Who waits
is admitted in order of arrival and only with blocks for all its tokens, so no one is passed by
because it is large. (Branches that wait for their leader's prompt let others pass meanwhile.) Layers that
see a window keep no prompt whole: each chunk takes their blocks as it comes. Blocks are taken from nobody
while a step is in flight: then there is no second step until it is answered.
The beams of a search are parked until all of them are computed, and hold their blocks meanwhile; a
search is let in only if all its beams fit, and where none but parked ones run, the youngest give way.
"""

from __future__ import annotations

from collections.abc import Set

from shoal.cache.manager import CacheManager
from shoal.errors import RequestError
from shoal.messages import Step, StepResult, TokenResult
from shoal.sched.flights import Flights, Share
from shoal.sched.intake import Limits, QueueBounds, make_branches
from shoal.sched.request import BranchUpdate, Request, RequestSpec, Status
from shoal.sched.roster import Roster, crossed
from shoal.sched.search import go_on
from shoal.sched.stats import SchedulerStats

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching over one :class:`CacheManager`.

    Args:
        cache: the blocks; nobody else changes it.
        max_num_seqs: branches running at once.
        max_num_batched_tokens: tokens computed in one step.
        max_model_len: tokens of one sequence, prompt and output.
        max_encoder_len: tokens of an encoder's input, which one step holds whole; 0: there is no encoder.
        max_num_queued_requests, max_num_queued_tokens: what may wait; see :class:`QueueBounds`.
        keeps_kv: False: ranks keep nothing of a sequence between steps, so a share is always all its tokens.
            ``max_num_batched_tokens`` then holds the longest sequence; blocks only bound how many run.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_queued_requests: int | None = None,
        max_num_queued_tokens: int | None = None,
        keeps_kv: bool = True,
        max_encoder_len: int = 0,
    ) -> None:
        assert keeps_kv or (max_num_batched_tokens >= max_model_len and not cache.enable_prefix_caching)
        assert max_num_seqs >= 1 and max_num_batched_tokens >= 1 and max_model_len >= 1
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._keeps_kv = keeps_kv
        shares_blocks = keeps_kv and not cache.has_slots
        encoder_len = min(max_encoder_len, max_num_batched_tokens - 1)
        window = cache.window
        if window is not None and not window.holds(1, max_num_batched_tokens):
            longest = min(cache.num_blocks, cache.blocks_for(max_model_len))
            assert longest <= window.num_blocks, "a sequence alone might not fit"
        self._limits = Limits(
            max_model_len,
            cache.num_blocks,
            cache.block_size,
            shares_blocks,
            max_num_seqs,
            encoder_len,
            window,
            max_num_batched_tokens,
        )
        self._queue_bounds = QueueBounds(max_num_queued_requests, max_num_queued_tokens)
        self._roster = Roster(cache)
        self._flights = Flights()
        self._only: frozenset[str] | None = None  # the requests that may run; None: all
        self._is_backlogged = False  # the last step had no room for someone
        self._next_sequence_id = 0
        self._next_step_id = 0

    @property
    def num_unfinished(self) -> int:
        """Branches running or waiting."""
        return len(self._roster.by_id)

    @property
    def request_ids(self) -> Set[str]:
        """The unfinished requests."""
        return self._roster.by_request.keys()

    @property
    def num_in_flight(self) -> int:
        """Steps handed out and not answered."""
        return len(self._flights)

    @property
    def stats(self) -> SchedulerStats:
        """How it stands."""
        return SchedulerStats(
            num_running=len(self._roster.running),
            num_waiting=len(self._roster.waiting),
            num_queued_requests=self._num_queued_requests(),
            num_queued_tokens=self._roster.waiting.num_prompt_tokens,
            cache_usage=max(self._cache.usage, self._cache.window_usage),
            window_cache_usage=self._cache.window_usage,
            num_prefix_queries=self._roster.num_prefix_queries,
            num_prefix_hits=self._roster.num_prefix_hits,
            num_preemptions=self._roster.num_preemptions,
        )

    def add(self, spec: RequestSpec) -> list[Request]:
        """Take a request in, behind those that wait.

        Returns:
            its branches, of a search as many as sequences are asked for; the first is the one whose
            ``num_cached`` counts for the request's usage.

        Raises:
            RequestError: it could never be served; ``field`` names why. Nothing has changed.
            QueueFullError: too many requests wait. Nothing has changed.
        """
        if spec.request_id in self._roster.by_request:
            raise RequestError(f"request_id: {spec.request_id!r} is still being served", field="request_id")
        branches = make_branches(spec, self._next_sequence_id, self._limits)
        self._queue_bounds.check(
            self._num_queued_requests(), self._roster.waiting.num_prompt_tokens, branches
        )
        self._next_sequence_id += len(branches)
        self._roster.enter(branches)
        return branches if spec.beams is None else branches[: spec.beams.num_returned]

    def schedule(self) -> Step | None:
        """The next step, which is in flight until ``update``; None if there is nothing to do, or nothing
        before the step in flight is answered.
        """
        shares: list[Share] = []
        if not self._deal(shares):
            return None
        step_id = self._next_step_id
        step = Step(step_id=step_id, sequences=tuple([request.step(count) for request, count in shares]))
        self._flights.launch(step_id, shares)
        self._next_step_id += 1
        return step

    def update(self, result: StepResult) -> list[BranchUpdate]:
        """Take the answer to the oldest step in flight in.

        Returns:
            what is new, for the branches that got a token or ended; not for those that ended while
            the step was in flight.
        """
        tokens = {token.sequence_id: token for token in result.tokens}
        updates = []
        groups = []
        for request, count in self._flights.land(result.step_id):
            if request.status is Status.FINISHED:
                self._roster.release(request)
                continue
            update = self._advance(request, count, tokens.get(request.sequence_id))
            if update is not None:
                updates.append(update)
            elif request.group is not None and request.group.is_complete:
                groups.append(request.group)
        for group in dict.fromkeys(groups):
            updates += go_on(self._roster, group, self._limits.shares_blocks, self._keeps_kv)
        if any(update.finish_reason for update in updates):
            self._roster.forget_finished()
        return updates

    def abort(self, request_id: str, reason: str = "abort") -> list[Request]:
        """End all branches of a request, whatever they are doing.

        Returns:
            the branches that had not finished before (of a search, for sequences asked for); none if the
            request is unknown.
        """
        branches = list(self._roster.by_request.get(request_id, {}).values())
        for request in branches:
            self._roster.withdraw(request, reason, None)
        return [r for r in branches if r.group is None or r.branch < r.group.spec.num_returned]

    def finish(self, sequence_id: int, reason: str, stop_reason: int | str | None = None) -> bool:
        """End one branch for a reason found outside, such as a stop string in its text.

        Returns:
            whether it had not finished before.
        """
        request = self._roster.by_id.get(sequence_id)
        if request is None:
            return False
        self._roster.withdraw(request, reason, stop_reason)
        return True

    def reset(self) -> list[Request]:
        """The pages are gone: forget the steps in flight and every prefix, and compute all anew.

        Running branches wait again in order of arrival; their tokens stay. Answers to the forgotten
        steps must not be handed in any more.

        Returns:
            the unfinished branches that were in a forgotten step.
        """
        lost = [request for request in self._flights.requests() if request.status is not Status.FINISHED]
        self._flights.clear()
        self._roster.reset()
        return lost

    def restrict(self, request_ids: frozenset[str] | None) -> None:
        """From now on run these requests alone, or all again (None). No step may be in flight."""
        if request_ids == self._only:
            return
        assert not self._flights, "a step is in flight"
        self._only = request_ids
        for request in reversed(self._roster.running[:]):
            if not self._may_run(request):
                self._roster.running.remove(request)
                self._roster.preempt(request)

    def lower_budget(self) -> int | None:
        """Halve the tokens of a step; how many that is, or None if it cannot be less."""
        lower = self._max_num_batched_tokens // 2
        if not self._keeps_kv or lower < max(self._cache.block_size, self._limits.max_encoder_len + 1):
            return None
        self._max_num_batched_tokens = lower
        return lower

    def check_integrity(self) -> None:
        """Assert that queue, running list, tables, blocks and steps agree."""
        roster = self._roster
        roster.check_integrity()
        assert self._num_seated() <= self._max_num_seqs
        self._flights.check_integrity({*roster.by_id.values(), *roster.unfreed})

    def _num_queued_requests(self) -> int:
        num_idle = 0 if self._is_backlogged else self._max_num_seqs - len(self._roster.running)
        return max(0, len(self._roster.waiting) - num_idle)

    # Dealing a step out

    def _deal(self, shares: list[Share]) -> bool:
        """Fill a step; returns whether it is one."""
        budget = self._deal_to_running(shares)
        if budget is None:
            return False
        self._is_backlogged = self._deal_to_waiting(shares, budget)
        while not shares and not self._flights and self._roster.running:
            # All that run are beams that wait for others of theirs, which find no room.
            self._roster.preempt(self._roster.running.pop())
            self._is_backlogged = self._deal_to_waiting(shares, budget)
        assert shares or self._flights or not self._roster.by_id, "there is work, and none of it can be done"
        return bool(shares)

    def _deal_to_running(self, shares: list[Share]) -> int | None:
        """Serve the running, oldest first; returns the budget left, or None if someone must give blocks up
        and a step in flight forbids it. (Blocks that were dealt out by then stay where they are needed.)

        Who is preempted is first in line again. What it gave up, less a block, is too little for it to
        come back in the same step, unless others have computed its prefix meanwhile.
        """
        budget = self._max_num_batched_tokens
        running = self._roster.running
        grow = self._cache.grow
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            start = request.num_scheduled
            count = len(request.token_ids) - start
            if count == 0:  # its next token is in flight
                if request.is_ending or request.group is not None or not self._keeps_kv:
                    index += 1
                    continue
                count = 1
            if count > budget:
                if not self._keeps_kv:
                    index += 1
                    continue
                count = budget
            if not grow(request.blocks, start + count):
                if self._flights:
                    return None
                assert len(running) > 1, "a branch alone does not fit, and was let in"
                self._roster.preempt(running.pop())  # the youngest: perhaps this very one
                continue
            shares.append((request, count))
            budget -= count
            index += 1
        return budget

    def _deal_to_waiting(self, shares: list[Share], budget: int) -> bool:
        """Let in who waits, in order; returns whether someone was held back for lack of room."""
        waiting = self._roster.waiting
        passed: list[Request] = []
        is_held_back = False
        num_free_seats = self._max_num_seqs - self._num_seated() if waiting else 0
        while waiting:
            if budget == 0 or num_free_seats == 0:
                is_held_back = True
                break
            request = waiting.popleft()
            if request.is_parked or _waits_for_leader(request) or not self._may_run(request):
                passed.append(request)
                continue
            num_encoded = 0 if crossed(request) else len(request.encoder_ids)
            least = num_encoded + (1 if self._keeps_kv else request.num_tokens)
            if least > budget or not self._roster.admit(request, budget - num_encoded):
                waiting.push_front(request)
                is_held_back = True
                break
            budget -= num_encoded
            count = min(request.num_tokens - request.num_computed, budget)
            shares.append((request, count))
            budget -= count
            num_free_seats -= 1
        for request in reversed(passed):
            waiting.push_front(request)
        return is_held_back

    def _may_run(self, request: Request) -> bool:
        return self._only is None or request.request_id in self._only

    def _num_seated(self) -> int:
        """The running, but for those whose last token is in flight."""
        running = self._roster.running
        return sum(not request.is_ending for request in running) if self._flights else len(running)

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
        if request.group is not None:
            request.is_parked = True
            request.group.take(request, token)
            return None
        request.token_ids.append(token.token_id)
        end = request.end()
        if end is None:
            if not self._keeps_kv:
                request.num_computed = request.num_scheduled = 0
            return BranchUpdate(request, token)
        self._roster.close(request, *end)
        self._roster.release(request)
        return BranchUpdate(request, token, *end)

    def _fail(self, request: Request, error: str) -> BranchUpdate | None:
        if request.group is not None:
            request.group.error = error
            return None
        self._roster.close(request, "error", None)
        self._roster.release(request)
        return BranchUpdate(request, None, "error", None, error)


def _waits_for_leader(request: Request) -> bool:
    """Whether the leader is still to compute, or computing, what this branch will share."""
    leader = request.leader
    return (
        leader is not None
        and leader.status is not Status.FINISHED
        and not leader.is_parked
        and leader.num_computed < request.num_led
    )
