"""Blocks of layers that see a window: given back behind it, found again by prefixes, apart from others."""

from __future__ import annotations

from array import array

import pytest

from shoal.cache.manager import CacheManager, SequenceBlocks
from shoal.cache.spec import WindowSpec

STORY = tuple(range(100, 112))


def sequence(*token_ids: int) -> SequenceBlocks:
    return SequenceBlocks(array("i", token_ids))


def windowed(window: int, num_window_blocks: int, *, caching: bool = True) -> CacheManager:
    spec = WindowSpec(window=window, block_size=2, num_blocks=num_window_blocks)
    return CacheManager(40, 2, enable_prefix_caching=caching, window=spec)


def start(manager: CacheManager, blocks: SequenceBlocks, num_first: int | None = None) -> int:
    """Admit a sequence on what is cached; returns how many tokens were."""
    prefix = manager.lookup(blocks)
    assert manager.admit(blocks, prefix, len(blocks.token_ids), None, num_first)
    return prefix.num_tokens


def held(manager: CacheManager) -> int:
    assert manager.window is not None
    return round(manager.window_usage * manager.window.num_blocks)


def test_a_sequence_keeps_its_windows_blocks_and_all_of_the_others() -> None:
    manager = windowed(window=5, num_window_blocks=6)
    blocks = sequence(*STORY)
    start(manager, blocks, num_first=4)
    assert len(blocks.block_ids) == 6 and len(blocks.window_ids) == 2
    for num_computed in range(4, 40):
        manager.commit(blocks, num_computed)
        if num_computed >= len(blocks.token_ids):
            blocks.token_ids.append(num_computed)
        assert manager.grow(blocks, num_computed + 1)
        manager.check_integrity([blocks])
        assert blocks.window_base == (num_computed - 4) // 2 and held(manager) <= 4
    assert len(blocks.block_ids) == 20
    manager.free(blocks)
    assert held(manager) == 0 and manager.num_free == 40
    manager.check_integrity([])


def test_a_chunk_that_finds_no_blocks_of_the_window_changes_nothing() -> None:
    manager = windowed(window=3, num_window_blocks=4)
    first, second = sequence(*STORY), sequence(1, 2, 3, 4, 5)
    start(manager, first, num_first=4)
    assert not manager.admit(second, manager.lookup(second), 5)
    assert not manager.grow(first, 9) and len(first.window_ids) == 2 and len(first.block_ids) == 6
    assert manager.num_free == 34
    assert manager.admit(second, manager.lookup(second), 5, None, 4)
    assert not manager.grow(first, 5)
    manager.check_integrity([first, second])


def test_a_prefix_is_as_long_as_the_window_before_its_end_is_there() -> None:
    """Of six blocks, a window takes two: any of these that is gone shortens what one can go on from."""
    manager = windowed(window=4, num_window_blocks=7)
    blocks = sequence(*STORY)
    start(manager, blocks)
    manager.commit(blocks, 12)
    manager.free(blocks)
    again = sequence(*STORY, 1)
    prefix = manager.lookup(again)
    assert prefix.num_tokens == 12 and prefix.window_base == 4 and len(prefix.window_ids) == 2
    manager._window.forget(prefix.nodes[4])
    manager.check_integrity([])
    assert manager.lookup(again).num_tokens == 8
    manager._window.forget(prefix.nodes[1])
    assert manager.lookup(again).num_tokens == 8
    manager._window.forget(prefix.nodes[3])
    assert manager.lookup(again).num_tokens == 2
    assert start(manager, again) == 2
    manager.commit(again, 13)
    manager.check_integrity([again])
    assert manager.lookup(sequence(*STORY, 2)).num_tokens == 12


def test_a_hit_shares_the_windows_blocks_and_no_others() -> None:
    manager = windowed(window=4, num_window_blocks=8)
    first = sequence(*STORY)
    start(manager, first)
    manager.commit(first, 12)
    second = sequence(*STORY, 1)
    assert start(manager, second) == 12
    assert second.window_base == 4 and second.window_ids[:2] == first.window_ids[-2:]
    manager.free(first)
    manager.check_integrity([second])
    assert held(manager) == 3


def test_equal_blocks_computed_twice_become_one() -> None:
    manager = windowed(window=9, num_window_blocks=12)
    one, two = sequence(*STORY), sequence(*STORY)
    start(manager, one)
    start(manager, two)
    assert held(manager) == 12
    manager.commit(one, 8)
    manager.commit(two, 8)
    assert one.window_ids[:4] == two.window_ids[:4] and held(manager) == 8
    manager.check_integrity([one, two])


def test_what_becomes_of_a_prefix_becomes_of_its_counterparts() -> None:
    """A registered block that is taken leaves no counterpart behind that nobody could find."""
    spec = WindowSpec(window=100, block_size=2, num_blocks=6)
    manager = CacheManager(3, 2, window=spec)
    blocks = sequence(*STORY[:6])
    start(manager, blocks)
    manager.commit(blocks, 6)
    manager.free(blocks)
    other = sequence(1, 2, 3, 4)
    start(manager, other)
    manager.check_integrity([other])
    assert len(manager._window._block_of) == 1
    manager.reset()
    manager.check_integrity([])


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_goes_on_from_whole_blocks_until_its_parent_is_far_ahead(caching: bool) -> None:
    manager = windowed(window=4, num_window_blocks=20, caching=caching)
    parent = sequence(*STORY, 1)
    start(manager, parent)
    manager.commit(parent, 13)
    forked = manager.fork(parent, 12)
    if not caching:
        assert forked is not None and forked.window_base == 4
        child = sequence(*STORY, 2)
        assert manager.admit(child, forked, 13)
        assert child.window_ids[:2] == parent.window_ids[:2] and child.window_ids[2] != parent.window_ids[2]
        manager.check_integrity([parent, child])
        manager.free(child)
    parent.token_ids.extend(range(8))
    for num_computed in range(14, 18):
        assert manager.grow(parent, num_computed)
        manager.commit(parent, num_computed)
    assert manager.fork(parent, 12) is None
    manager.check_integrity([parent])
