"""What a reader leaves unread is bounded."""

from __future__ import annotations

import asyncio

from shoal.engine.unread import Unread


def test_items_come_in_order_and_any_number_may_wait_without_a_bound() -> None:
    async def read() -> list[int]:
        unread = Unread[int](None, lambda: -1)
        for item in range(5000):
            unread.put_nowait(item)
        return [await unread.get() for _ in range(5000)]

    assert asyncio.run(read()) == list(range(5000))


def test_one_too_many_replaces_all_of_them_once_and_for_all() -> None:
    overruns = []

    def overrun() -> int:
        overruns.append(1)
        return -1

    async def read() -> int:
        unread = Unread[int](3, overrun)
        for item in range(10):
            unread.put_nowait(item)
        first = await unread.get()
        unread.put_nowait(7)  # comes too late
        assert unread._items.empty()
        return first

    assert asyncio.run(read()) == -1
    assert overruns == [1]


def test_who_reads_in_time_is_never_given_up() -> None:
    async def read() -> list[int]:
        unread = Unread[int](2, lambda: -1)
        got = []
        for item in range(0, 100, 2):
            unread.put_nowait(item)
            unread.put_nowait(item + 1)
            got += [await unread.get(), await unread.get()]
        return got

    assert asyncio.run(read()) == list(range(100))
