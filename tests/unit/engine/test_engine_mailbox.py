"""Items reach the queues they were posted to, in order, with one wake-up of their event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.engine.mailbox import Mailbox


class CountedLoop(asyncio.SelectorEventLoop):
    """Counts who wakes it from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_wakes = 0

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> asyncio.Handle:
        self.num_wakes += 1
        return super().call_soon_threadsafe(*args, **options)


async def taken(queue: asyncio.Queue[int], count: int) -> list[int]:
    return [await queue.get() for _ in range(count)]


def test_many_items_for_many_queues_wake_the_loop_once() -> None:
    loop, mailbox = CountedLoop(), Mailbox[int]()
    queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(50)]
    for item in range(3):
        for queue in queues:
            mailbox.post(loop, queue, item)
    assert loop.num_wakes == 0 and queues[0].empty(), "nothing is sent before it is flushed"
    mailbox.flush()
    assert loop.num_wakes == 1
    assert all(loop.run_until_complete(taken(queue, 3)) == [0, 1, 2] for queue in queues)
    mailbox.flush()
    assert loop.num_wakes == 1, "there was nothing more"
    loop.close()


def test_each_loop_gets_its_own() -> None:
    mailbox = Mailbox[int]()
    loops = [CountedLoop(), CountedLoop()]
    queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in loops]
    for number, (loop, queue) in enumerate(zip(loops, queues, strict=True)):
        mailbox.post(loop, queue, number)
    mailbox.flush()
    for number, (loop, queue) in enumerate(zip(loops, queues, strict=True)):
        assert loop.run_until_complete(taken(queue, 1)) == [number]
        loop.close()


def test_a_closed_loop_is_refused_and_does_not_keep_others_from_theirs() -> None:
    mailbox = Mailbox[int]()
    closing, open_ = CountedLoop(), CountedLoop()
    left, read = asyncio.Queue[int](), asyncio.Queue[int]()
    mailbox.post(closing, left, 1)
    mailbox.post(open_, read, 2)
    closing.close()
    with pytest.raises(RuntimeError, match="closed"):
        mailbox.post(closing, left, 3)
    mailbox.flush()
    assert open_.run_until_complete(taken(read, 1)) == [2]
    open_.close()
