"""Waiting for work while the client may leave and the time may run out. Knows no engine and no schema."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from shoal.server.errors import ClientGone, Fault

__all__ = ["Deadline", "cancelled", "close", "merged", "until_disconnected", "while_connected"]

T = TypeVar("T")


class Deadline:
    """When a request must be complete, counted from when it came.

    Args:
        timeout_s: the server's own limit in seconds; None means never.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._whose = "the server's limit"
        self._began = asyncio.get_running_loop().time()

    def shorten(self, timeout_s: float | None) -> None:
        """Take the client's own limit, if it has one and that is shorter."""
        if timeout_s is not None and (self._timeout_s is None or timeout_s < self._timeout_s):
            self._timeout_s, self._whose = timeout_s, "its timeout"

    async def wait_first(self, *tasks: asyncio.Future[Any]) -> None:
        """Return when one of ``tasks`` is done, or at the deadline."""
        left = None
        if self._timeout_s is not None:
            left = max(0.0, self._began + self._timeout_s - asyncio.get_running_loop().time())
        await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def fault(self) -> Fault:
        """What the client is told once the deadline has passed."""
        message = f"the request took longer than {self._whose} of {self._timeout_s:g} seconds"
        return Fault(504, message, kind="server_error", code="request_timeout")


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel ``tasks`` and wait until they have ended; what they raise meanwhile is dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnected(receive: Receive) -> None:
    """Return when the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], deadline: Deadline) -> T:
    """The result of ``work``, which is cancelled if the client leaves or the time runs out.

    Raises:
        ClientGone: the client left first.
        Fault: the deadline passed first (504).
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_disconnected(receive))
    try:
        await deadline.wait_first(working, leaving)
        if working.done():
            return working.result()
        raise ClientGone if leaving.done() else deadline.fault()
    finally:
        await cancelled(working, leaving)


async def close(stream: AsyncIterator[Any]) -> None:
    """Close ``stream`` if it can be (async generators can)."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all ``streams`` as they come, each with its stream's index.

    Every stream is asked for its first item before any is waited for, and an exception goes before
    the items that are ready at the same time: a refused stream refuses the whole. Closing this
    closes all of them.
    """
    if len(streams) == 1:  # the usual case costs no task per item
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await close(streams[0])
        return
    waiting = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ready = sorted(done, key=waiting.__getitem__)
            items = [(waiting.pop(task), task.result()) for task in ready]
            for index, got in items:
                if got is not None:
                    waiting[asyncio.ensure_future(_next(streams[index]))] = index
                    yield index, got[0]
    finally:
        await cancelled(*waiting)
        for stream in streams:
            await close(stream)


async def _next(stream: AsyncIterator[T]) -> tuple[T] | None:
    try:
        return (await anext(stream),)
    except StopAsyncIteration:
        return None
