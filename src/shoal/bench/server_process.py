"""A ``shoal serve`` of our own for the length of a measurement. Knows its command line and its ``/ready``."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from shoal.errors import EngineError

__all__ = ["serving"]

_STOP_S = 30.0
_ASK_EVERY_S = 0.2


@contextmanager
def serving(model: str, arguments: Sequence[str], start_s: float = 1800.0) -> Iterator[str]:
    """The URL of a server that is ready.

    Args:
        model: what to serve.
        arguments: further ones of ``shoal serve``.
        start_s: how long it may take to load.

    Raises:
        EngineError: it ended, or was not ready in time; its own words are on stderr.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "shoal", "serve", model, "--port", str(port), *arguments]
    # What it prints goes to stderr: stdout is for the result alone.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)
    try:
        _wait_ready(process, url, start_s)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    direct = build_opener(ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError(f"shoal serve ended with status {process.returncode} before it was ready")
        try:
            with direct.open(f"{url}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):  # nobody listens yet, or it answers 503 while it loads
            time.sleep(_ASK_EVERY_S)
    raise EngineError(f"shoal serve was not ready within {start_s:g} s")


def _free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
