"""Carries what one thread produces to queues of event loops, waking each loop once for many items. Knows no
engine: an item is anything.

A wake-up costs a system call, and hands the interpreter to the thread that wakes: paid for every item of a
step it would cost more than the step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Generic, Protocol, TypeVar

__all__ = ["Inbox", "Mailbox"]

Item = TypeVar("Item")
Item_in = TypeVar("Item_in", contravariant=True)


class Inbox(Protocol[Item_in]):
    """Where items end up: a queue of an event loop, called on that loop alone."""

    def put_nowait(self, item: Item_in, /) -> None: ...


class Mailbox(Generic[Item]):
    """Items on their way. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted: dict[asyncio.AbstractEventLoop, list[tuple[Inbox[Item], Item]]] = {}

    def post(self, events: asyncio.AbstractEventLoop, inbox: Inbox[Item], item: Item) -> None:
        """Have an item put into an inbox of ``events`` at the next :meth:`flush`, in order of posting.

        Raises:
            RuntimeError: the loop is closed: nobody will ever read it.
        """
        if events.is_closed():
            raise RuntimeError("the event loop of the receiver is closed")
        with self._lock:
            self._posted.setdefault(events, []).append((inbox, item))

    def flush(self) -> None:
        """Send everything off."""
        with self._lock:
            posted, self._posted = self._posted, {}
        for events, items in posted.items():
            with contextlib.suppress(RuntimeError):  # closed meanwhile: the next post will say so
                events.call_soon_threadsafe(_put, items)


def _put(items: list[tuple[Inbox[Item], Item]]) -> None:
    for inbox, item in items:
        inbox.put_nowait(item)
