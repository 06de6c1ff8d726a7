"""A Ctrl-C in the middle of a forward pass waits for its end: ranks in step must not lose one of them. Knows
no rank.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["interrupts_wait"]


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold a first SIGINT back until the block is over; a second one comes through at once.

    Only the main thread gets signals; elsewhere nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual: Any = signal.getsignal(signal.SIGINT)
    if not callable(usual):  # ignored, left to the system, or not Python's to say
        yield
        return
    waiting: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if waiting:
            usual(number, frame)
        waiting.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if len(waiting) == 1:
            usual(signal.SIGINT, waiting[0])
