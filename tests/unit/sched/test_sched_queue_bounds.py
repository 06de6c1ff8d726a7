"""How much may wait is bounded by requests and by prompt tokens, and told."""

from __future__ import annotations

import pytest

from shoal.cache.manager import CacheManager
from shoal.errors import QueueFullError
from shoal.messages import SamplingSpec, StepResult, TokenResult
from shoal.sched.request import RequestSpec
from shoal.sched.scheduler import Scheduler


def make_scheduler(**bounds: int) -> Scheduler:
    return Scheduler(
        CacheManager(64, 4), max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64, **bounds
    )


def spec(name: str, num_tokens: int, n: int = 1) -> RequestSpec:
    sampling = tuple(SamplingSpec(temperature=0.0, branch=branch) for branch in range(n))
    return RequestSpec(request_id=name, prompt_ids=[1] * num_tokens, sampling=sampling, max_tokens=2)


def step(scheduler: Scheduler) -> None:
    step = scheduler.schedule()
    assert step is not None
    tokens = tuple(TokenResult(sequence_id=s.sequence_id, token_id=5) for s in step.sequences if s.sampling)
    scheduler.update(StepResult(step_id=step.step_id, tokens=tokens))


def test_prompt_tokens_that_wait_are_bounded() -> None:
    scheduler = make_scheduler(max_num_queued_tokens=10)
    scheduler.add(spec("runs", 8))
    step(scheduler)
    scheduler.add(spec("waits", 6))
    scheduler.add(spec("fits", 4))
    with pytest.raises(QueueFullError, match=r"10 prompt tokens wait already, and the request has 1 .*is 10"):
        scheduler.add(spec("too many", 1))
    assert scheduler.stats.num_queued_tokens == 10
    scheduler.abort("waits")
    scheduler.add(spec("another", 6))
    scheduler.check_integrity()


def test_every_branch_counts() -> None:
    scheduler = make_scheduler(max_num_queued_tokens=10)
    scheduler.add(spec("waits", 1))
    with pytest.raises(QueueFullError, match="the request has 12"):
        scheduler.add(spec("broad", 3, n=4))


def test_every_branch_that_waits_takes_a_place() -> None:
    """A request is let in whole where there is a place, and then its branches keep others out."""
    scheduler = make_scheduler(max_num_queued_requests=4)
    scheduler.add(spec("broad", 3, n=5))
    assert scheduler.stats.num_queued_requests == 4
    with pytest.raises(QueueFullError, match="4 requests wait already"):
        scheduler.add(spec("next", 1))
    scheduler.abort("broad")
    scheduler.add(spec("next", 1))
    scheduler.check_integrity()


def test_who_finds_nobody_waiting_is_let_in_however_long() -> None:
    scheduler = make_scheduler(max_num_queued_tokens=10)
    scheduler.add(spec("long", 40))
    with pytest.raises(QueueFullError):
        scheduler.add(spec("next", 1))
    step(scheduler)
    step(scheduler)
    scheduler.add(spec("next", 40))


def test_what_waits_is_told() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(spec(name, 5))
    assert (scheduler.stats.num_queued_requests, scheduler.stats.num_queued_tokens) == (2, 15)
    step(scheduler)
    assert (scheduler.stats.num_queued_requests, scheduler.stats.num_queued_tokens) == (2, 10)
    while scheduler.num_unfinished:
        step(scheduler)
    assert (scheduler.stats.num_queued_requests, scheduler.stats.num_queued_tokens) == (0, 0)
    scheduler.check_integrity()
