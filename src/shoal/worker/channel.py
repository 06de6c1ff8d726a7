"""Messages over a connected socket: a length, then msgpack. Knows no meaning of any message."""

from __future__ import annotations

import socket
import struct
import time

from shoal.messages import Message, decode, encode

__all__ = ["Channel"]

_HEADER = struct.Struct("<Q")


class Channel:
    """One end of a conversation. Not thread safe: one sender and one receiver at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, timeout_s: float | None = None) -> None:
        """Send one message.

        Raises:
            TimeoutError: the other end did not take it in within ``timeout_s``.
            OSError: the other end is gone.
        """
        self.send_bytes(encode(message), timeout_s)

    def send_bytes(self, data: bytes, timeout_s: float | None = None) -> None:
        """Send a message that is encoded already (one encoding serves many ranks)."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_HEADER.pack(len(data)) + data)

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: nothing (or not all of it) came within ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size, deadline))
        return decode(self._exactly(size, deadline))

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            left = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
            self._socket.settimeout(left)
            try:
                part = self._socket.recv(min(size - len(parts), 1 << 20))
            except ConnectionError as error:
                raise EOFError(str(error)) from error
            if not part:
                raise EOFError("the other end closed the connection")
            parts += part
        return bytes(parts)
