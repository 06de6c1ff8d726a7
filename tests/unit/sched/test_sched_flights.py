"""What the scheduler promises of steps in flight, one rule at a time."""

from __future__ import annotations

import pytest
from sched_simulator import World
from sched_words import counts, long_spec

from shoal.messages import PLACEHOLDER_ID, SamplingSpec, StepResult, TokenResult, unpack_ids
from shoal.sched.request import RequestSpec


def test_an_abort_in_flight_keeps_the_blocks_until_the_step_is_answered():
    """A rank may still write them; then they are free, and no update speaks of the branch."""
    world = World()
    (request,) = world.add(long_spec("a", [1, 2, 3]))
    world.begin()
    world.abort("a")
    assert request.finish_reason == "abort" and world.cache.usage > 0
    assert world.end() == []
    assert world.cache.usage == 0.0


def test_steps_are_answered_once_and_in_order():
    """A third step in flight, a second answer, or one out of turn is a bug of the caller's."""
    world = World()
    world.add(long_spec("a", [1]))
    first, second = world.scheduler.schedule(), world.scheduler.schedule()
    with pytest.raises(AssertionError):
        world.scheduler.schedule()
    token = TokenResult(sequence_id=0, token_id=1)
    with pytest.raises(AssertionError):
        world.scheduler.update(StepResult(step_id=second.step_id, tokens=(token,)))
    for step in (first, second):
        world.scheduler.update(StepResult(step_id=step.step_id, tokens=(token,)))
        with pytest.raises(AssertionError):
            world.scheduler.update(StepResult(step_id=step.step_id, tokens=(token,)))


def test_a_second_step_computes_what_the_first_samples():
    """A placeholder for the token of who decodes; the next chunk of who is still being read in."""
    world = World(depth=2, max_num_batched_tokens=4)
    world.add(long_spec("a", [1, 2]))
    world.add(long_spec("b", list(range(9))))
    world.begin()
    step = world.begin()
    assert counts(step) == {0: 1, 1: 3}
    assert unpack_ids(step.sequences[0].token_ids)[0] == PLACEHOLDER_ID
    assert list(unpack_ids(step.sequences[1].token_ids)) == [2, 3, 4]
    world.end()
    world.drain()


def test_who_is_sure_to_end_is_left_out_and_its_seat_is_given_away():
    """By max_tokens or the sequence's length; with nothing else to do there is no second step."""
    world = World(depth=2, max_num_seqs=1)
    world.add(long_spec("a", [1, 2], max_tokens=1))
    world.begin()
    assert world.begin() is None
    world.add(long_spec("b", [1], max_tokens=3))
    assert list(counts(world.begin())) == [1]
    world.end()
    world.drain()
    world = World(depth=2, max_model_len=3)
    world.add(long_spec("a", [1, 2], max_tokens=None))
    world.begin()
    assert world.begin() is None
    world.end()


def test_what_a_branch_that_has_ended_samples_is_dropped():
    """Its blocks are kept until the step that still writes them is answered."""
    world = World(depth=2)
    (request,) = world.add(
        RequestSpec(
            request_id="a",
            prompt_ids=[1],
            sampling=(SamplingSpec(temperature=0.0),),
            max_tokens=100,
            stop_ids=frozenset(range(24)),
        )
    )
    world.begin()
    world.begin()
    (update,) = world.end()
    assert update.finish_reason == "stop" and world.cache.usage > 0
    assert world.begin() is None and world.scheduler.num_in_flight == 1
    assert world.end() == [] and world.cache.usage == 0.0 and request.num_output == 1


def test_nobody_gives_blocks_up_while_a_step_is_in_flight():
    """The second step waits for the answer to the first; then the youngest is preempted as ever."""
    world = World(depth=2, num_blocks=5, block_size=2, max_num_seqs=2)
    world.add(long_spec("old", [1, 2, 3], max_tokens=6))
    (young,) = world.add(long_spec("young", [2, 2, 2], max_tokens=6))
    while world.begin() is not None:
        world.end() if len(world.in_flight) == 2 else None
    assert young.num_preemptions == 0 and len(world.in_flight) == 1
    world.end()
    world.begin()
    assert young.num_preemptions == 1
    world.drain()


def test_a_reset_forgets_both_steps():
    """And the next one asks for nothing that a fresh rank cannot know."""
    world = World(depth=2)
    (request,) = world.add(long_spec("a", [1, 2, 3]))
    world.step()
    world.begin()
    world.reset()
    assert world.scheduler.num_in_flight == 0 and request.num_output == 1
    assert counts(world.begin()) == {0: 4}
    world.end()
    world.drain()
