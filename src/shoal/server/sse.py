"""Server-sent events, the form in which OpenAI streams (html.spec.whatwg.org, "Server-sent events").
Knows no engine: it sends an iterator of JSON-ready objects and closes it when the client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.server.errors import Fault, error_body, fault_of
from shoal.server.waiting import Deadline, cancelled, until_disconnected

__all__ = ["DONE", "EventStream", "event"]

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """One event. JSON has no raw line break, so one ``data:`` line is enough."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class EventStream(Response):
    """Sends chunks as events, then ``[DONE]``.

    An exception after the stream began is sent as an event with OpenAI's error body, then ``[DONE]``.
    When the client leaves, ``chunks`` is closed at once, also while it waits.

    Args:
        first: the first chunk, a JSON-ready object.
        chunks: those that follow; closed in every case.
        deadline: when to give up.
        count: called with the reason of an error that is sent, and ``client_gone``.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Any,
        chunks: AsyncGenerator[Any, None],
        deadline: Deadline,
        count: Callable[[str], None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._deadline = deadline
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(until_disconnected(receive))
        try:
            await self._deadline.wait_first(sending, leaving)
            if sending.done():
                sending.result()
            elif not leaving.done():
                await cancelled(sending)  # a send waits before it writes, so events stay whole
                await self._chunks.aclose()  # before the last event: a client that reads nothing blocks it
                await self._end(send, self._told(self._deadline.fault()))
            else:
                self._count("client_gone")
        finally:
            await cancelled(sending, leaving)
            await self._chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send(send, event(self._first))
        error: dict[str, Any] | None = None
        try:
            async for chunk in self._chunks:
                await self._send(send, event(chunk))
        except Exception as failure:  # the status is sent: this is the only way left to tell the client
            error = self._told(fault_of(failure))
        await self._end(send, error)

    def _told(self, fault: Fault) -> dict[str, Any]:
        self._count(fault.reason)
        return error_body(fault)

    async def _send(self, send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self, send: Send, error: dict[str, Any] | None) -> None:
        body = DONE if error is None else event(error) + DONE
        await send({"type": "http.response.body", "body": body, "more_body": False})
