"""What is loaded when a process settles is no longer looked at by the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shoal.process.heap import settle


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_was_there_is_out_of_sight_and_what_comes_later_is_not() -> None:
    before = [object()]
    settle()
    after = [object()]
    tracked = gc.get_objects()
    assert gc.get_freeze_count() > 0
    assert all(found is not before for found in tracked)
    assert any(found is after for found in tracked)
