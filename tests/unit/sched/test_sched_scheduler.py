"""What the scheduler promises one rule at a time; test_sched_simulation.py lets them meet."""

from __future__ import annotations

import statistics
import time

import pytest
from sched_simulator import World
from sched_words import counts, long_spec, spec

from shoal.cache.manager import CacheManager
from shoal.errors import QueueFullError, RequestError
from shoal.messages import SamplingSpec, StepResult, TokenResult
from shoal.sched.request import RequestSpec, Status
from shoal.sched.scheduler import Scheduler


def test_with_nothing_to_do_there_is_no_step():
    """None, before the first request and after the last."""
    world = World()
    assert world.begin() is None
    world.add(spec("a", [1], max_tokens=1))
    world.step()
    assert world.begin() is None and world.scheduler.num_unfinished == 0


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    """And only the last chunk samples."""
    world = World(max_num_batched_tokens=4)
    world.add(long_spec("a", list(range(10))))
    sizes = []
    for _ in range(4):
        step = world.begin()
        sizes.append((*counts(step).values(), step.sequences[0].sampling is not None))
        world.end()
    assert sizes == [(4, False), (4, False), (2, True), (1, True)]


def test_running_requests_come_before_new_prompts():
    """What the running leave of the budget goes to who waits."""
    world = World(max_num_batched_tokens=6)
    world.add(long_spec("a", [1, 2]))
    world.step()
    world.add(long_spec("b", list(range(9))))
    assert counts(world.begin()) == {0: 1, 1: 5}
    world.end()
    assert counts(world.begin()) == {0: 1, 1: 4}


def test_no_more_run_than_allowed():
    """The third waits until one is done."""
    world = World(max_num_seqs=2)
    for name in "abc":
        world.add(long_spec(name, [1], max_tokens=2))
    assert list(counts(world.begin())) == [0, 1]
    world.end()
    world.step()
    assert list(counts(world.begin())) == [2]


def test_a_budget_of_one_serves_everybody_in_turn():
    """One token per step, the oldest first, to the end."""
    world = World(max_num_batched_tokens=1)
    for name in "abc":
        world.add(long_spec(name, [1, 2, 3], max_tokens=2))
    world.drain()


def test_a_large_request_is_not_passed_by_smaller_ones():
    """It waits for blocks at the head of the queue, and who came later waits behind it."""
    world = World(num_blocks=4, block_size=2)
    world.add(long_spec("small", [1, 2], max_tokens=4))
    world.step()
    world.add(long_spec("large", [1] * 6, max_tokens=2))
    world.add(long_spec("tiny", [1], max_tokens=1))
    assert list(counts(world.begin())) == [0]
    world.end()
    world.drain()


def test_a_cached_prompt_starts_behind_its_prefix_and_counts_as_cached():
    """num_cached, queries and hits in tokens, once per request."""
    world = World(num_blocks=16, block_size=2)
    world.add(long_spec("a", [1, 2, 3, 4, 5], max_tokens=1))
    world.step()
    (again,) = world.add(long_spec("b", [1, 2, 3, 4, 6], max_tokens=2))
    step = world.begin()
    assert step.sequences[0].start == 4 and again.num_cached == 4
    world.end()
    world.drain()
    stats = world.scheduler.stats
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (10, 4)


def test_a_chunk_is_shared_as_soon_as_it_is_answered():
    """A prefix can be hit while the prompt that brought it is still being computed."""
    world = World(num_blocks=16, block_size=2, max_num_batched_tokens=5)
    world.add(long_spec("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    world.step()
    (follower,) = world.add(long_spec("b", [1, 2, 3, 4, 9]))
    world.step()
    assert follower.num_cached == 4


def test_the_youngest_is_preempted_and_finishes_with_the_same_output():
    """Its output is computed again, not sampled again; num_output counts on; hits count once."""
    world = World(num_blocks=5, block_size=2, max_num_seqs=2)
    (old,) = world.add(long_spec("old", [1, 2, 3], max_tokens=6))
    (young,) = world.add(long_spec("young", [2, 2, 2], max_tokens=6))
    while young.num_preemptions == 0:
        world.step()
    assert young.status is Status.WAITING and old.status is Status.RUNNING
    assert young.num_computed == 0 and young.num_output > 0
    world.drain()
    assert old.num_preemptions == 0
    stats = world.scheduler.stats
    assert stats.num_preemptions == young.num_preemptions
    assert stats.num_prefix_queries == 6 and young.num_cached == 0


def test_a_preempted_request_comes_back_before_later_arrivals():
    """To the front of the queue, by arrival."""
    world = World(num_blocks=5, block_size=2, max_num_seqs=2)
    world.add(long_spec("old", [1, 2, 3], max_tokens=6))
    (young,) = world.add(long_spec("young", [2, 2, 2], max_tokens=6))
    (late,) = world.add(long_spec("late", [0], max_tokens=1))
    while young.num_preemptions == 0:
        world.step()
    while late.status is Status.WAITING:
        world.step()
    assert young.status is not Status.WAITING


def test_a_sequence_may_fill_the_cache_to_the_last_slot():
    """Capped output ends with "length", after capacity + 1 tokens: the last needs no slot."""
    world = World(num_blocks=3, block_size=2, max_model_len=100)
    (request,) = world.add(long_spec("a", [1, 2], max_tokens=None))
    world.drain()
    assert request.num_tokens == 7 and request.finish_reason == "length"


def test_the_model_length_ends_a_sequence():
    """max_model_len counts prompt and output."""
    world = World(max_model_len=6)
    (request,) = world.add(long_spec("a", [1, 2], max_tokens=None))
    world.drain()
    assert request.num_tokens == 6 and request.finish_reason == "length"


def test_a_request_that_can_never_fit_is_refused_and_leaves_nothing():
    """The next one gets the next id and is served."""
    world = World(num_blocks=2, block_size=2)
    with pytest.raises(RequestError, match="KV cache"):
        world.add(long_spec("a", [1] * 5))
    (request,) = world.add(long_spec("a", [1]))
    assert request.sequence_id == 0
    world.drain()


def test_a_request_id_is_refused_while_it_is_in_use():
    """And free again afterwards."""
    world = World()
    world.add(spec("a", [1]))
    with pytest.raises(RequestError) as caught:
        world.add(spec("a", [2]))
    assert caught.value.field == "request_id"
    world.drain()
    world.add(spec("a", [2]))
    world.drain()


def test_the_queue_is_bounded_beyond_what_the_next_step_has_room_for():
    """One runs, one waits, the third is refused: whether or not a step came in between."""
    for steps_between in (0, 1):
        world = World(max_num_seqs=1, bound=1)
        world.add(long_spec("a", [1]))
        for _ in range(steps_between):
            world.step()
        world.add(long_spec("b", [1]))
        with pytest.raises(QueueFullError, match="max_num_queued_requests is 1"):
            world.add(long_spec("c", [1]))
        world.drain()
        world.add(long_spec("c", [1]))


def test_the_queue_is_bounded_when_blocks_are_short_too():
    """Free places among the running are no room when there are no blocks."""
    world = World(num_blocks=2, block_size=2, max_num_seqs=100, bound=1)
    world.add(long_spec("a", [1, 2, 3], max_tokens=2))
    world.add(long_spec("b", [1, 2, 3], max_tokens=2))
    world.step()
    with pytest.raises(QueueFullError):
        world.add(long_spec("c", [1]))
    world.drain()


def test_a_token_that_ends_a_branch_is_part_of_its_output():
    """Update and request agree on reason and token, and blocks are free at once."""
    world = World()
    (request,) = world.add(
        RequestSpec(
            request_id="a",
            prompt_ids=[1],
            sampling=(SamplingSpec(temperature=0.0),),
            max_tokens=100,
            stop_ids=frozenset(range(24)),
        )
    )
    step = world.scheduler.schedule()
    answer = StepResult(step_id=step.step_id, tokens=(TokenResult(sequence_id=0, token_id=7),))
    (update,) = world.scheduler.update(answer)
    assert (update.token_ids, update.finish_reason, update.stop_reason) == ([7], "stop", 7)
    assert (list(request.output_ids), request.finish_reason, request.stop_reason) == ([7], "stop", 7)
    assert world.cache.usage == 0.0


def test_an_error_ends_its_branch_alone():
    """Also in the middle of a prompt; the others get their tokens."""
    world = World(max_num_batched_tokens=4)
    world.add(long_spec("a", [1, 2]))
    world.add(long_spec("b", list(range(8))))
    world.begin()
    world.errors_next.add(1)
    updates = world.end()
    assert [(update.request.request_id, update.finish_reason) for update in updates] == [
        ("a", None),
        ("b", "error"),
    ]
    world.drain()


def test_a_missing_answer_is_an_error_of_that_branch():
    """Every branch gets an answer, whatever a rank leaves out."""
    world = World()
    world.add(long_spec("a", [1, 2]))
    step = world.scheduler.schedule()
    (update,) = world.scheduler.update(StepResult(step_id=step.step_id))
    assert update.finish_reason == "error" and "no token" in update.error
    assert world.scheduler.num_unfinished == 0 and world.cache.usage == 0.0


def test_what_failed_is_not_shared():
    """Blocks of a step that failed for a branch are nobody's prefix."""
    world = World(block_size=2)
    world.add(long_spec("a", [1, 2, 3, 4, 5]))
    world.begin()
    world.errors_next.add(0)
    world.end()
    (again,) = world.add(long_spec("b", [1, 2, 3, 4, 5]))
    world.step()
    assert again.num_cached == 0


def test_an_abort_between_steps_frees_at_once():
    """Waiting or running, all branches."""
    world = World(block_size=2)
    world.add(long_spec("a", [1, 2, 3], n=2))
    world.step()
    world.step()
    world.add(long_spec("b", [1]))
    world.abort("b")
    world.abort("a")
    assert world.cache.usage == 0.0 and world.scheduler.num_unfinished == 0
    assert world.scheduler.abort("a") == [] and world.scheduler.abort("never seen") == []


def test_a_stop_found_in_the_text_ends_one_branch():
    """Once; the second time nothing happens."""
    world = World(block_size=2)
    one, two = world.add(long_spec("a", [1, 2, 3], n=2))
    world.step()
    world.step()
    assert world.scheduler.finish(one.sequence_id, "stop", "###")
    assert not world.scheduler.finish(one.sequence_id, "stop", "###")
    assert (one.finish_reason, one.stop_reason) == ("stop", "###")
    assert two.status is Status.RUNNING and world.scheduler.num_unfinished == 1
    assert not world.scheduler.finish(999, "stop")


def test_replay_computes_everything_again_and_samples_nothing_twice():
    """After a reset in flight: waiting in order of arrival, outputs kept, prefixes gone."""
    world = World(max_num_seqs=2)
    requests = [world.add(long_spec(name, [1, 2, 3]))[0] for name in "abc"]
    world.step()
    world.begin()
    world.reset()
    assert all(request.status is Status.WAITING and request.num_computed == 0 for request in requests)
    assert [request.num_output for request in requests] == [1, 1, 0]
    step = world.begin()
    assert counts(step) == {0: 4, 1: 4} and [item.num_output for item in step.sequences] == [1, 1]
    world.end()
    world.drain()
    assert world.scheduler.stats.num_preemptions == 0
    assert world.scheduler.stats.num_prefix_queries == 9


def test_the_stats_say_how_it_stands():
    """Running, waiting and usage, by branches and blocks."""
    world = World(num_blocks=8, max_num_seqs=1)
    world.add(long_spec("a", [1] * 6))
    world.add(long_spec("b", [1], n=2))
    world.step()
    stats = world.scheduler.stats
    assert (stats.num_running, stats.num_waiting, stats.cache_usage) == (1, 2, 0.25)


def test_a_step_of_256_decoding_branches_costs_little():
    """Well under a millisecond on an idle core; the bound only catches work that grows with the square."""
    scheduler = Scheduler(
        CacheManager(256 * 8, 16), max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=512
    )
    for number in range(256):
        scheduler.add(long_spec(str(number), [number] * 20, max_tokens=60))
    times = []
    for _ in range(40):
        start = time.perf_counter()
        step = scheduler.schedule()
        elapsed = time.perf_counter() - start
        tokens = tuple(TokenResult(sequence_id=item.sequence_id, token_id=1) for item in step.sequences)
        start = time.perf_counter()
        scheduler.update(StepResult(step_id=step.step_id, tokens=tokens))
        times.append(elapsed + time.perf_counter() - start)
    assert len(step.sequences) == 256 and statistics.median(times) < 0.01
