"""Messages over a connected socket: a length, then msgpack. Knows no meaning of any message."""

from __future__ import annotations

from shoal.messages import Message, decode, encode
from shoal.process.frames import Frames

__all__ = ["Channel"]


class Channel(Frames):
    """One end of a conversation. Not thread safe: one sender and one receiver at a time."""

    def send(self, message: Message, timeout_s: float | None = None) -> None:
        """Send one message; ``send_bytes`` takes one that is encoded already (once for many ranks).

        Raises:
            TimeoutError: the other end did not take it in within ``timeout_s``.
            OSError: the other end is gone.
        """
        self.send_bytes(encode(message), timeout_s)

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: nothing (or not all of it) came within ``timeout_s``.
        """
        return decode(bytes(self.receive_bytes(timeout_s)))
