"""For tests of the engine's loop: a sink that keeps what it is told, and a submission by a short text."""

from __future__ import annotations

import queue
from typing import Any

from shoal.engine.loop import EngineLoop
from shoal.engine.outputs import RequestDelta
from shoal.errors import EngineDeadError
from shoal.sampling_params import SamplingParams

__all__ = ["LONG", "Inbox", "submit"]

LONG = SamplingParams(max_tokens=20)


class Inbox:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self._items: queue.Queue[Any] = queue.Queue()

    def __call__(self, item: Any) -> None:
        self._items.put(item)

    def next(self) -> Any:
        return self._items.get(timeout=10)

    def text(self) -> str:
        """What comes until the end, which must be a finished delta."""
        text = ""
        while True:
            item = self.next()
            if item is not None:
                assert isinstance(item, RequestDelta), item
                text += item.outputs[0].text
                if item.finished:
                    return text

    def last(self) -> Any:
        """The latest thing told."""
        item = self.next()
        while not self.is_empty:
            item = self.next()
        return item

    def last_error(self) -> EngineDeadError:
        """The error that ends it."""
        while True:
            item = self.next()
            if isinstance(item, EngineDeadError):
                return item

    @property
    def is_empty(self) -> bool:
        return self._items.empty()


def submit(loop: EngineLoop, text: str, params: SamplingParams = LONG, name: str | None = None) -> Inbox:
    inbox = Inbox()
    loop.submit(name or text, [ord(letter) for letter in text], params, inbox)
    return inbox
