from __future__ import annotations

from array import array

import pytest

from shoal.cache.manager import CacheManager, SequenceBlocks


def sequence(*token_ids: int, salt: bytes = b"") -> SequenceBlocks:
    return SequenceBlocks(array("i", token_ids), salt)


def admit(manager: CacheManager, blocks: SequenceBlocks) -> int:
    """Admit a sequence on what is cached; returns how many tokens were."""
    prefix = manager.lookup(blocks)
    assert manager.admit(blocks, prefix, len(blocks.token_ids))
    return prefix.num_tokens


def compute_and_free(manager: CacheManager, blocks: SequenceBlocks) -> list[int]:
    admit(manager, blocks)
    manager.commit(blocks, len(blocks.token_ids))
    block_ids = list(blocks.block_ids)
    manager.free(blocks)
    return block_ids


def test_a_computed_prefix_is_found_again():
    """Full blocks only; the tail is computed."""
    manager = CacheManager(8, 2)
    first = compute_and_free(manager, sequence(1, 2, 3, 4, 5))
    again = sequence(1, 2, 3, 4, 9)
    assert admit(manager, again) == 4
    assert list(again.block_ids[:2]) == first[:2]
    manager.check_integrity([again])


def test_a_lookup_leaves_a_token_to_compute():
    """A prompt that is cached to the last token still computes its last block."""
    manager = CacheManager(8, 2)
    compute_and_free(manager, sequence(1, 2, 3, 4))
    assert manager.lookup(sequence(1, 2, 3, 4)).num_tokens == 2
    assert manager.lookup(sequence(1, 2, 3, 4, 5)).num_tokens == 4
    assert manager.lookup(sequence(1, 2)).num_tokens == 0


def test_only_what_was_committed_is_found():
    """Blocks that are allocated, or half computed, are nobody's prefix yet."""
    manager = CacheManager(8, 2)
    blocks = sequence(1, 2, 3, 4, 5)
    admit(manager, blocks)
    assert manager.lookup(sequence(1, 2, 3)).num_tokens == 0
    manager.commit(blocks, 3)
    assert manager.lookup(sequence(1, 2, 3, 4, 5)).num_tokens == 2


def test_a_prefix_is_shared_while_its_owner_still_runs():
    """Two holders, one block."""
    manager = CacheManager(4, 2)
    one, two = sequence(1, 2, 3), sequence(1, 2, 4)
    admit(manager, one)
    manager.commit(one, 3)
    assert admit(manager, two) == 2 and two.block_ids[0] == one.block_ids[0]
    manager.free(one)
    manager.check_integrity([two])
    manager.free(two)
    assert manager.num_free == 4 and manager.usage == 0.0


def test_equal_blocks_computed_twice_become_one():
    """Two sequences that computed the same prefix side by side end up sharing it."""
    manager = CacheManager(8, 2)
    one, two = sequence(1, 2, 3), sequence(1, 2, 4)
    admit(manager, one)
    admit(manager, two)
    assert manager.num_free == 4
    manager.commit(one, 3)
    manager.commit(two, 3)
    assert one.block_ids[0] == two.block_ids[0] and manager.num_free == 5
    manager.check_integrity([one, two])


def test_eviction_takes_the_least_recently_used_prefix():
    """Of three cached prefixes, the one looked up last survives longest."""
    manager = CacheManager(3, 2)
    for token_id in (1, 2, 3):
        compute_and_free(manager, sequence(token_id, 0))
    user = sequence(1, 0, 5)
    prefix = manager.lookup(user)
    assert manager.admit(user, prefix, 2)
    manager.free(user)
    filler = sequence(8, 8)
    admit(manager, filler)
    found = [manager.lookup(sequence(token_id, 0, 5)).num_tokens for token_id in (1, 2, 3)]
    assert found == [2, 0, 2]
    manager.check_integrity([filler])


def test_eviction_shortens_a_prefix_from_its_tail():
    """One block taken from a cached chain leaves the chain's head usable."""
    manager = CacheManager(3, 2)
    compute_and_free(manager, sequence(1, 2, 3, 4, 5, 6))
    admit(manager, sequence(9))
    assert manager.lookup(sequence(1, 2, 3, 4, 5, 6, 7)).num_tokens == 4


def test_a_refused_admission_changes_nothing():
    """Blocks of its own prefix that are free do not count as room for the rest."""
    manager = CacheManager(3, 2)
    compute_and_free(manager, sequence(1, 2, 3, 4))
    other = sequence(9, 9)
    admit(manager, other)
    long = sequence(1, 2, 3, 4, 5, 6, 7)
    prefix = manager.lookup(long)
    assert prefix.num_tokens >= 2
    assert not manager.admit(long, prefix, 7)
    assert manager.num_free == 2 and not long.block_ids
    manager.check_integrity([other])


def test_growing_takes_a_block_only_when_the_last_is_full():
    """And says so when there is none."""
    manager = CacheManager(2, 2)
    blocks = sequence(1)
    admit(manager, blocks)
    assert manager.grow(blocks, 2) and len(blocks.block_ids) == 1
    assert manager.grow(blocks, 3) and len(blocks.block_ids) == 2
    assert not manager.grow(blocks, 5) and len(blocks.block_ids) == 2


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_whole_blocks_and_goes_its_own_way(caching):
    """Also without a lookup, and without prefix caching; what it computes then is cached as ever."""
    manager = CacheManager(8, 2, enable_prefix_caching=caching)
    leader, follower = sequence(1, 2, 3, 4, 5), sequence(1, 2, 3, 4, 5, 6)
    admit(manager, leader)
    manager.commit(leader, 5)
    assert manager.admit(follower, manager.fork(leader, 4), 6)
    assert follower.block_ids[:2] == leader.block_ids[:2]
    assert follower.block_ids[2] != leader.block_ids[2]
    manager.commit(follower, 6)
    manager.check_integrity([leader, follower])
    manager.free(leader)
    manager.free(follower)
    assert manager.num_free == 8
    assert manager.lookup(sequence(1, 2, 3, 4, 5, 6, 7)).num_tokens == (6 if caching else 0)


def test_without_prefix_caching_nothing_is_found():
    """Off means off."""
    manager = CacheManager(8, 2, enable_prefix_caching=False)
    compute_and_free(manager, sequence(1, 2, 3, 4))
    assert manager.lookup(sequence(1, 2, 3, 4)).num_tokens == 0
    manager.check_integrity([])


def test_salts_do_not_share():
    """Not even when every digest is the same."""
    for digest in ({}, {"digest": lambda parent, tokens: b"same"}):
        manager = CacheManager(8, 2, **digest)
        compute_and_free(manager, sequence(1, 2, 3, salt=b"a"))
        assert manager.lookup(sequence(1, 2, 3, salt=b"b")).num_tokens == 0
        assert manager.lookup(sequence(1, 2, 3)).num_tokens == 0
        assert manager.lookup(sequence(1, 2, 3, salt=b"a")).num_tokens == 2


def test_a_collision_costs_a_miss_and_never_gives_wrong_blocks():
    """With one digest for everything, only the very content that was registered is found."""
    manager = CacheManager(8, 2, digest=lambda parent, tokens: b"same")
    compute_and_free(manager, sequence(1, 2, 3, 4, 5))
    assert manager.lookup(sequence(1, 2, 3, 4, 5)).num_tokens == 2
    assert manager.lookup(sequence(3, 4, 5)).num_tokens == 0
    compute_and_free(manager, sequence(3, 4, 5))
    assert manager.lookup(sequence(3, 4, 5)).num_tokens == 0
    manager.check_integrity([])


def test_reset_takes_everything():
    """Nobody holds anything, and no prefix is remembered."""
    manager = CacheManager(8, 2)
    blocks = sequence(1, 2, 3, 4, 5)
    admit(manager, blocks)
    manager.commit(blocks, 5)
    manager.reset()
    assert manager.num_free == 8 and not blocks.block_ids
    assert manager.lookup(sequence(1, 2, 3)).num_tokens == 0
    manager.check_integrity([])
    assert admit(manager, blocks) == 0


def test_tokens_appended_later_are_registered_as_they_are_computed():
    """A sequence's array grows, and its full blocks become a prefix for others."""
    manager = CacheManager(8, 2)
    blocks = sequence(1, 2, 3)
    admit(manager, blocks)
    manager.commit(blocks, 3)
    blocks.token_ids.append(4)
    assert manager.grow(blocks, 4)
    manager.commit(blocks, 4)
    assert manager.lookup(sequence(1, 2, 3, 4, 5)).num_tokens == 4


def test_a_sequence_is_let_in_only_with_a_slot_for_its_state():
    """Each holder has one of its own, and gives it back with its blocks."""
    manager = CacheManager(8, 2, enable_prefix_caching=False, num_slots=2)
    first, second, third = sequence(1), sequence(2), sequence(3)
    admit(manager, first)
    admit(manager, second)
    assert {first.slot, second.slot} == {0, 1}
    assert not manager.admit(third, manager.lookup(third), 1)
    assert third.slot == -1 and manager.num_free == 6
    manager.free(first)
    assert first.slot == -1
    admit(manager, third)
    manager.check_integrity([second, third])
    manager.reset()
    assert second.slot == third.slot == -1
    manager.check_integrity([])
