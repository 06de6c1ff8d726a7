"""Byte strings over a connected socket, each behind its length. Knows no meaning of any of them."""

from __future__ import annotations

import socket
import struct
import time

__all__ = ["Frames"]

_HEADER = struct.Struct("<Q")


class Frames:
    """One end of a conversation. Not thread safe: one sender and one receiver at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_bytes(self, data: bytes | memoryview, timeout_s: float | None = None) -> None:
        """Send one frame.

        Raises:
            TimeoutError: the other end did not take it in within ``timeout_s``.
            OSError: the other end is gone.
        """
        self._socket.settimeout(timeout_s)
        size = len(data) if isinstance(data, bytes) else data.nbytes
        if size <= 1 << 16:
            self._socket.sendall(_HEADER.pack(size) + data)
        else:  # not copied
            self._socket.sendall(_HEADER.pack(size))
            self._socket.sendall(data)

    def receive_bytes(self, timeout_s: float | None = None) -> bytearray:
        """The next frame.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: nothing (or not all of it) came within ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header), deadline)
        data = bytearray(_HEADER.unpack(header)[0])
        self._fill(memoryview(data), deadline)
        return data

    def receive_into(self, out: memoryview) -> None:
        """The next frame, which must be exactly as long as ``out``, written there.

        Raises:
            EOFError: the other end is gone, or what it sent has another length.
        """
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header), None)
        (size,) = _HEADER.unpack(header)
        if size != out.nbytes:
            raise EOFError(f"{size} bytes came, {out.nbytes} were expected")
        self._fill(out, None)

    def close(self) -> None:
        self._socket.close()

    def _fill(self, out: memoryview, deadline: float | None) -> None:
        done = 0
        while done < out.nbytes:
            left = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
            self._socket.settimeout(left)
            try:
                count = self._socket.recv_into(out[done:])
            except ConnectionError as error:
                raise EOFError(str(error)) from error
            if not count:
                raise EOFError("the other end closed the connection")
            done += count
