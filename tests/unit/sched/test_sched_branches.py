"""The branches of one request: one computes the prompt, the others share its blocks."""

from __future__ import annotations

import pytest
from sched_simulator import World
from sched_words import counts, long_spec

from shoal.errors import QueueFullError


def test_branches_of_one_request_take_one_place_in_the_queue():
    """A bound of one lets a request with three branches in, and no second."""
    world = World(max_num_seqs=1, bound=1)
    world.add(long_spec("a", [1, 2, 3], n=3))
    with pytest.raises(QueueFullError):
        world.add(long_spec("b", [1]))
    world.drain()


@pytest.mark.parametrize("caching", [True, False])
def test_branches_share_the_prompts_blocks(caching):
    """The leader computes the prompt, the others its tail; usage shows the blocks once."""
    world = World(num_blocks=16, block_size=2, caching=caching)
    branches = world.add(long_spec("a", [1, 2, 3, 4, 5], n=3, max_tokens=3))
    assert counts(world.begin()) == {0: 5}
    world.end()
    assert counts(world.begin()) == {0: 1, 1: 1, 2: 1}
    world.end()
    tables = [list(request.blocks.block_ids) for request in branches]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert [request.num_cached for request in branches] == [0, 4, 4]
    world.drain()
    assert world.scheduler.stats.num_prefix_queries == (5 if caching else 0)


def test_waiting_followers_let_others_pass_and_stay_first_in_line():
    """A request behind them starts at once; they start before what came later."""
    world = World(max_num_batched_tokens=6, num_blocks=32, block_size=2, max_num_seqs=3)
    world.add(long_spec("a", [1] * 9, n=2))
    world.add(long_spec("b", [2]))
    world.add(long_spec("c", [2]))
    assert counts(world.begin()) == {0: 6}
    world.end()
    assert counts(world.begin()) == {0: 3, 2: 1, 3: 1}
    world.end()
    world.finish(2, "###")
    world.add(long_spec("d", [2]))
    assert set(counts(world.begin())) == {0, 1, 3}
    world.end()
    world.drain()


@pytest.mark.parametrize("caching", [True, False])
def test_followers_go_on_without_their_leader(caching):
    """Finished before its prompt was computed, or with the very step that did."""
    for steps_before in (0, 1, 2):
        world = World(max_num_batched_tokens=4, block_size=2, num_blocks=16, caching=caching)
        leader, follower = world.add(long_spec("a", [1, 2, 3, 4, 5, 6], n=2, max_tokens=3))
        for _ in range(steps_before):
            world.step()
        world.finish(leader.sequence_id, "###")
        world.drain()
        assert follower.num_output == 3
