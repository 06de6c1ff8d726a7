"""Words of many operations lie in one array; slots of one key are set together."""

from __future__ import annotations

from shoal.fuse.arena import Arena, Slot


def test_each_operation_finds_its_words_and_slots_get_their_value_with_its_offset() -> None:
    arena = Arena([[1, Slot("a"), 3], [Slot("b", 8), Slot("a", 4)], []])
    arena.set("a", 100)
    arena.set("b", 200)
    assert arena.words(0).tolist() == [1, 100, 3]
    assert arena.words(1).tolist() == [208, 104]
    assert arena.words(2).tolist() == []
    arena.set("a", 0)
    assert arena.words(0).tolist() == [1, 0, 3] and arena.words(1).tolist() == [208, 4]


def test_words_are_views_that_never_move() -> None:
    arena = Arena([[Slot("a")], [7]])
    words = arena.words(0)
    address = words.ctypes.data
    arena.set("a", 5)
    assert words.tolist() == [5] and arena.words(0).ctypes.data == address
    arena.words(1)[0] = 9
    assert arena.words(1).tolist() == [9]


def test_a_key_that_nobody_has_is_fine_and_keys_are_listed_once() -> None:
    arena = Arena([[Slot(("value", "x")), Slot("rows"), Slot("rows")]])
    arena.set("nobody", 1)
    assert arena.slots == [("value", "x"), "rows"]
    assert Arena([]).slots == []
