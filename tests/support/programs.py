"""Starts shoal in processes of its own, waits for what they print or serve, and looks at what they leave."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, poll_s: float = 0.05) -> float:
    """Poll until true; how long it took in seconds."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(poll_s)
    return time.monotonic() - started


def status_of(url: str) -> int:
    """The HTTP status of a GET; 0 if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class Server:
    """``shoal serve`` with some arguments, ready when constructed."""

    def __init__(
        self, *arguments: str, log: Path, timeout_s: float = 240, env: dict[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal", "serve", *arguments, "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
            )
        try:
            wait_until(self._is_up, timeout_s, f"{self.url}/ready")
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return status_of(f"{self.url}/ready") == 200

    def ranks(self) -> list[psutil.Process]:
        """The rank processes it started."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if _is_rank(child)]

    def stop(self, timeout_s: float = 60) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "shoal.worker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has just ended
        return False


def are_gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def shared_memory() -> set[str]:
    """Names of the shared-memory segments of this machine."""
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **changes}
