"""Streams merge fairly, refuse together and close together."""

from __future__ import annotations

import asyncio

import pytest

from shoal.server.waiting import merged


class Numbers:
    """0, 1, ... ``count``, then the end or ``error``; remembers that it was closed."""

    def __init__(self, count: int, error: Exception | None = None, hang: bool = False) -> None:
        self.count, self.error, self.hang = count, error, hang
        self.closed = False

    async def stream(self):
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                yield number
            if self.error:
                raise self.error
            if self.hang:
                await asyncio.Event().wait()
        finally:
            self.closed = True


def test_all_items_come_with_their_stream():
    async def run():
        sources = [Numbers(2), Numbers(3)]
        items = [item async for item in merged([source.stream() for source in sources])]
        return items, [source.closed for source in sources]

    items, closed = asyncio.run(run())
    assert sorted(items) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert closed == [True, True]


def test_a_stream_refused_at_once_comes_before_any_item():
    async def run():
        sources = [Numbers(5), Numbers(0, ValueError("no")), Numbers(1, hang=True)]
        got = []
        with pytest.raises(ValueError, match="no"):
            async for item in merged([source.stream() for source in sources]):
                got.append(item)
        return got, [source.closed for source in sources]

    assert asyncio.run(run()) == ([], [True, True, True])


@pytest.mark.parametrize("count", [1, 3])
def test_closing_closes_streams_that_wait(count):
    async def run():
        sources = [Numbers(1, hang=True) for _ in range(count)]
        stream = merged([source.stream() for source in sources])
        for _ in range(count):
            await anext(stream)
        await stream.aclose()
        return [source.closed for source in sources]

    assert asyncio.run(run()) == [True] * count
