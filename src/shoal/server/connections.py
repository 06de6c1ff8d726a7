"""What one connection may cost: how many there are, and how long they may say or take nothing.

uvicorn's protocol with three limits that it does not have. A client that opens connections and sends no
request, or reads no answer, would otherwise hold them for good. Knows no route.

| limit | what happens |
|---|---|
| ``max_connections`` | requests on further connections are marked; ``Boundary`` refuses them |
| no request head within 10 s | the connection is closed |
| nothing taken of an answer for 30 s | the connection is aborted; with it, its request |

Hundreds of requests that come at one moment, or a body of a hundred thousand chunks, would be read in a row,
and nobody else answered meanwhile: a few are begun, or read on, in each round of the event loop. What is
short and no POST, such as ``GET /health``, is read at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import resource
import termios
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.server.boundary import CROWDED

__all__ = ["allow_descriptors", "limited"]

_log = logging.getLogger("shoal.server")

_HEAD_TIMEOUT_S = 10.0
_WRITE_TIMEOUT_S = 30.0
_BEGUN_AT_ONCE = 8  # requests in one round of the event loop: some 8 ms
_PIECE_BYTES = 4096  # of a body, read at a time: as chunks of one byte, 6 ms
_SPARE = 256  # connections beyond the limit that are still told so; descriptors for everything else


class _Turns:
    """Work on the event loop that is done a few pieces at a time, in order; all else goes on in between."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        """Have ``work`` done soon."""
        self._waiting.append(work)
        if len(self._waiting) == 1:
            loop.call_soon(self._go_on, loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(_BEGUN_AT_ONCE, len(self._waiting))):
            loop.call_soon(self._waiting.popleft())
        if self._waiting:
            loop.call_soon(self._go_on, loop)


class _Connection(H11Protocol):
    """One connection; the limits are :func:`limited`'s."""

    turns: _Turns
    max_connections: int
    head_timeout_s: float
    write_timeout_s: float

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _num_unread: int = 0  # what came and waits for its turn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections + _SPARE:
            transport.abort()
            return
        if len(self.connections) > self.max_connections:
            self.app_state = {**self.app_state, CROWDED: True}
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._num_unread and len(data) <= _PIECE_BYTES and not data.startswith(b"POST "):
            self._take(data)
            return
        for start in range(0, len(data), _PIECE_BYTES):
            self._num_unread += 1
            self.turns.add(self.loop, partial(self._read, data[start : start + _PIECE_BYTES]))

    def _read(self, data: bytes) -> None:
        self._num_unread -= 1
        if not self.transport.is_closing():
            self._take(data)

    def _take(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_writing()  # what was closed stays open until all of it is taken

    def _watch_head(self) -> None:
        """Give the client time for a request's head, unless one is being answered."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif not is_answering and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def _watch_writing(self) -> None:
        """Give the client time to take some of what is there now."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self.transport.get_write_buffer_size():
            left = self._num_untaken()
            self._write_timer = self.loop.call_later(self.write_timeout_s, self._writing_is_late, left)

    def _writing_is_late(self, before: int) -> None:
        if self._num_untaken() < before:
            self._watch_writing()
        elif self.transport.get_write_buffer_size():
            _log.info("a client took nothing for %g s and was cut off", self.write_timeout_s)
            self.transport.abort()

    def _num_untaken(self) -> int:
        """Bytes of answers that the client has not taken: ours, and the kernel's where it tells.

        The kernel takes from us only when a third of its megabytes is free, which may be a minute.
        """
        unsent = array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, unsent)
        return self.transport.get_write_buffer_size() + unsent[0]


def limited(
    max_connections: int,
    head_timeout_s: float = _HEAD_TIMEOUT_S,
    write_timeout_s: float = _WRITE_TIMEOUT_S,
) -> type[asyncio.Protocol]:
    """uvicorn's ``http`` protocol with these limits."""
    limits = {
        "turns": _Turns(),
        "max_connections": max_connections,
        "head_timeout_s": head_timeout_s,
        "write_timeout_s": write_timeout_s,
    }
    return type("Connection", (_Connection,), limits)


def allow_descriptors(max_connections: int) -> int:
    """Have the system allow descriptors for so many connections, as far as this process may ask for them.

    Returns:
        how many connections there may be.
    """
    needed = max_connections + 2 * _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    possible = max(soft - 2 * _SPARE, 1)
    _log.warning("max_connections is %d: there are descriptors for no more (ulimit -n)", possible)
    return possible
