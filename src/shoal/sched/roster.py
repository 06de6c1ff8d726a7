"""Who waits, who runs, and the blocks they hold. Knows no budget, no step and no answer."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter

from shoal.cache.manager import CacheManager, SequenceBlocks
from shoal.sched.queue import WaitingQueue
from shoal.sched.request import Request, Status

__all__ = ["Roster", "crossed"]

_arrival = attrgetter("sequence_id")


class Roster:
    """The unfinished branches of one scheduler, which alone changes them."""

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in order of arrival
        self.by_request: dict[str, dict[int, Request]] = {}  # unfinished, by request id and sequence id
        self.by_id: dict[int, Request] = {}  # unfinished, by sequence id
        self.unfreed: set[Request] = set()  # finished while a step of theirs was in flight
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_preemptions = 0

    def enter(self, branches: Sequence[Request]) -> None:
        """A new request, behind all others."""
        self.by_request[branches[0].request_id] = {request.sequence_id: request for request in branches}
        for request in branches:
            self.by_id[request.sequence_id] = request
            self.waiting.append(request)

    def admit(self, request: Request, budget: int) -> bool:
        """Start a branch on what is cached, if there are blocks for all its tokens; where layers see a
        window, for those of its first step, which computes at most ``budget``.
        """
        cache = self.cache
        leader = request.leader
        prefix = cache.lookup(request.blocks)
        if leader is not None and leader.status is Status.RUNNING and prefix.num_tokens < request.num_shared:
            prefix = cache.fork(leader.blocks, request.num_shared) or prefix
        sibling = crossed(request)
        num_first = min(request.num_tokens, prefix.num_tokens + budget)
        if not cache.admit(request.blocks, prefix, request.num_tokens, sibling, num_first):
            return False
        request.num_computed = request.num_scheduled = prefix.num_tokens
        request.encodes_at = prefix.num_tokens if sibling is None else -1
        request.status = Status.RUNNING
        if request.num_cached is None:
            request.num_cached = prefix.num_tokens
            if leader is None and cache.enable_prefix_caching:
                self.num_prefix_queries += request.num_prompt
                self.num_prefix_hits += prefix.num_tokens
        insort(self.running, request, key=_arrival)
        return True

    def preempt(self, request: Request) -> None:
        """Take the blocks of a branch that no longer runs; it waits again."""
        self.cache.free(request.blocks)
        self.requeue(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def requeue(self, request: Request) -> None:
        """Have a branch that holds nothing any more wait in its place."""
        request.status = Status.WAITING
        request.num_computed = request.num_scheduled = request.num_flights = 0
        self.waiting.put_back(request)

    def withdraw(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """End a branch from outside a step."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.release(request)
        self.close(request, reason, stop_reason)

    def release(self, request: Request) -> None:
        """Free the blocks of a branch that ends or has ended, once no step in flight can write them."""
        if request.num_flights:
            self.unfreed.add(request)
            return
        self.unfreed.discard(request)
        self.cache.free(request.blocks)

    def close(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """A branch has ended."""
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        del self.by_id[request.sequence_id]
        group = self.by_request[request.request_id]
        del group[request.sequence_id]
        if not group:
            del self.by_request[request.request_id]

    def forget_finished(self) -> None:
        """Take those that have ended out of the running."""
        self.running = [request for request in self.running if request.status is Status.RUNNING]

    def reset(self) -> None:
        """The pages are gone: all wait, and hold nothing."""
        self.unfreed.clear()
        self.cache.reset()
        while self.running:
            self.requeue(self.running.pop())

    def check_integrity(self) -> None:
        """Assert that queue, running list, tables and blocks agree."""
        running = self.running
        assert running == sorted(running, key=_arrival), "the running branches are out of order"
        assert all(request.status is Status.RUNNING for request in running)
        assert len(running) + len(self.waiting) == len(self.by_id)
        by_request = [request for group in self.by_request.values() for request in group.values()]
        assert {id(request) for request in by_request} == {id(r) for r in self.by_id.values()}
        for request in self.by_id.values():
            held = len(request.blocks.block_ids) * self.cache.block_size
            assert request.num_computed < request.num_tokens or request.is_parked
            assert request.num_computed <= request.num_scheduled <= held
            if self.cache.window is not None:
                num_blocks = request.blocks.window_base + len(request.blocks.window_ids)
                assert request.num_scheduled <= num_blocks * self.cache.block_size
            assert (request.status is Status.RUNNING) == bool(held), "who waits holds nothing, who runs does"
        assert all(r.status is Status.FINISHED and r.num_flights for r in self.unfreed)
        self.waiting.check_integrity()
        self.cache.check_integrity([request.blocks for request in (*running, *self.unfreed)])


def crossed(request: Request) -> SequenceBlocks | None:
    """What a branch holds that has computed the cross-attention to the same encoder input."""
    leader = request.leader
    if request.encoder_ids and leader and leader.status is Status.RUNNING and leader.num_computed:
        return leader.blocks
    return None
