from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cache.pool import BlockPool


def test_blocks_are_taken_once_each_and_usage_follows():
    """No id is handed out twice while held."""
    pool = BlockPool(4)
    taken = pool.take(3)
    assert len(set(taken)) == 3 and pool.num_free == 1 and pool.usage == 0.75
    pool.release(taken)
    assert pool.num_free == 4 and pool.usage == 0.0
    pool.check_integrity()


def test_more_than_free_is_refused():
    """Asking for more than is free is a bug of the caller's."""
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.take(3)


def test_a_block_held_twice_is_freed_by_the_second_release():
    """Reference counts."""
    pool = BlockPool(1)
    block_ids = pool.take(1)
    pool.share(block_ids)
    pool.release(block_ids)
    assert pool.num_free == 0
    pool.release(block_ids)
    assert pool.num_free == 1


def test_releasing_a_free_block_is_noticed():
    """A double free never passes silently."""
    pool = BlockPool(1)
    block_ids = pool.take(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(block_ids)


def test_blank_blocks_are_taken_before_kept_ones():
    """Content worth keeping survives while there is anything else, even if that was freed later."""
    pool = BlockPool(3)
    kept, *rest = pool.take(3)
    pool.keep(kept)
    pool.release([kept])
    pool.release(rest)
    assert set(pool.take(2)) == set(rest)
    assert pool.take(1) == [kept]
    assert not pool.is_kept(kept)


def test_the_least_recently_freed_goes_first_and_of_one_sequence_the_tail():
    """LRU between sequences, tail first within one."""
    pool = BlockPool(4)
    old, new = pool.take(2), pool.take(2)
    for block_id in old + new:
        pool.keep(block_id)
    pool.release(old)
    pool.release(new)
    assert pool.take(4) == [old[1], old[0], new[1], new[0]]


def test_sharing_a_kept_free_block_saves_it_and_makes_it_recent():
    """A hit takes the block out of the queue for eviction; its release puts it at the end."""
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.keep(first)
    pool.keep(second)
    pool.release([first])
    pool.release([second])
    pool.share([first])
    assert pool.num_free == 1
    pool.release([first])
    assert pool.take(2) == [second, first]


def test_sharing_a_blank_free_block_is_an_error():
    """There is nothing in it to share."""
    pool = BlockPool(1)
    with pytest.raises(KeyError):
        pool.share([0])


def test_reset_frees_and_forgets():
    """After a reset all blocks are free and none is kept."""
    pool = BlockPool(3)
    for block_id in pool.take(2):
        pool.keep(block_id)
    pool.reset()
    assert pool.num_free == 3 and not any(pool.is_kept(block_id) for block_id in range(3))
    pool.check_integrity()


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("tskr"), st.integers(0, 9)), max_size=40))
def test_any_order_of_operations_keeps_the_counts(num_blocks, operations):
    """take, share, keep, release in any order: integrity holds, and free plus held is all."""
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for operation, number in operations:
        if operation == "t" and pool.num_free:
            held += pool.take(1 + number % pool.num_free)
        elif held:
            block_id = held[number % len(held)]
            if operation == "s":
                pool.share([block_id])
                held.append(block_id)
            elif operation == "k":
                pool.keep(block_id)
            elif operation == "r":
                pool.release([block_id])
                held.remove(block_id)
        pool.check_integrity()
        assert pool.num_free == num_blocks - len(set(held))
