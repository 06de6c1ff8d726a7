"""What waits between the engine's thread and one reader, on the reader's event loop. Knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Unread"]

Item = TypeVar("Item")


class Unread(Generic[Item]):
    """A queue for one reader that may be given up: then what waits is dropped, and so is what still comes.

    Args:
        most: items that may wait; None: any number.
        overrun: called once, when an item comes on top of those; what it returns is read in their place.
    """

    def __init__(self, most: int | None, overrun: Callable[[], Item]) -> None:
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._most = most
        self._overrun = overrun
        self._is_given_up = False

    def put_nowait(self, item: Item) -> None:
        """Add an item, unless there are too many."""
        if self._is_given_up:
            return
        if self._most is not None and self._items.qsize() >= self._most:
            self._is_given_up = True
            while not self._items.empty():
                self._items.get_nowait()
            item = self._overrun()
        self._items.put_nowait(item)

    async def get(self) -> Item:
        """The next item, once there is one."""
        return await self._items.get()
