"""A server as a process: the port is bound first, signals drain, a second signal ends at once."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from shoal.errors import ConfigError, EngineError
from shoal.server.run import bind

# A process whose engine counts to max_tokens, hangs, or never loads, behind shoal's own serve command.
_SCRIPT = """
import asyncio, signal, sys
sys.path.insert(0, {folder!r})
from server_fake import FakeFrontend
from shoal.cli import serve
from shoal.cli.main import main
from shoal.errors import ModelNotFoundError

class Slow(FakeFrontend):
    async def shutdown(self, timeout_s=None):
        if {kind!r} == "stubborn":
            await asyncio.Event().wait()
        await super().shutdown(timeout_s)
        while self.running:
            await asyncio.sleep(0)

async def start(config):
    if {kind!r} == "loading":
        await asyncio.Event().wait()
    if {kind!r} == "broken":
        raise ModelNotFoundError("model: there is none", field="model")
    engine = Slow(hang_after=2)
    if {kind!r} in ("dying", "staying"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, die, engine)
    return engine

def die(engine):
    engine.is_alive = engine.is_ready = False
    engine.death.set()

serve._start_engine = start
flags = ["--keep-alive-on-failure"] if {kind!r} == "staying" else []
sys.exit(main(["serve", "demo", "--port", "0", *flags]))
"""


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()

    def wait_for(self, pattern: str) -> str:
        """The first group of the first log line that matches; fails after a minute."""

        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines)), None)

        with self.changed:
            assert self.changed.wait_for(found, 60), f"no {pattern!r} in {self.lines}"
            match = found()
            assert match is not None
            return match[1] if match.groups() else ""


@contextlib.contextmanager
def served(kind: str) -> Iterator[Served]:
    script = _SCRIPT.format(folder=str(Path(__file__).parent), kind=kind)
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as process:
        server = Served(process)
        reader = threading.Thread(target=server.read)
        reader.start()
        try:
            server.url = server.wait_for(r"listening on (\S+),")
            yield server
        finally:
            process.kill()
            reader.join()


def test_a_signal_lets_running_requests_finish():
    with served("counting") as server, httpx.Client(base_url=server.url) as client:
        server.wait_for("ready: ")
        assert client.get("/ready").status_code == 200
        body = {"prompt": "a", "max_tokens": 4, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.iter_text()
            text = next(chunks)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(chunks)
        assert "03 " in text and text.endswith("data: [DONE]\n\n")
        assert server.process.wait(10) == 0


def test_while_draining_it_is_not_ready_and_a_second_signal_ends_at_once():
    with served("stubborn") as server:
        server.wait_for("ready: ")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping: ")
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == -signal.SIGTERM


def test_an_engine_that_gives_up_ends_the_server_with_status_1():
    with served("dying") as server:
        server.wait_for("ready: ")
        server.process.send_signal(signal.SIGUSR1)
        assert server.process.wait(10) == 1
        server.wait_for("signal 9")
        assert not any("Traceback" in line for line in server.lines)


def test_with_keep_alive_on_failure_it_stays_and_says_that_it_is_unhealthy():
    with served("staying") as server:
        server.wait_for("ready: ")
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.process.send_signal(signal.SIGUSR1)
        server.wait_for("staying, but serving nothing")
        for path in ("health", "ready"):
            assert httpx.get(f"{server.url}/{path}").status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0


def test_while_loading_it_answers_and_a_signal_stops_it():
    with served("loading") as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 503
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0


def test_a_failed_load_is_told_and_ends_the_server():
    with served("broken") as server:
        assert server.process.wait(10) == 2
        server.wait_for("error: model: there is none")


def test_a_port_in_use_is_refused_before_anything_loads():
    with contextlib.closing(bind("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port}.*in use"):
            bind("127.0.0.1", port)
        command = [sys.executable, "-m", "shoal", "serve", "demo", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"error: cannot listen on 127.0.0.1 port {port}" in done.stderr


def test_a_host_that_does_not_exist_is_a_usage_error():
    with pytest.raises(ConfigError) as refused:
        bind("no.such.host.invalid", 0)
    assert refused.value.field == "host"


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_ipv6_address_is_understood():
    try:
        listener = bind("::1", 0)
    except EngineError:
        pytest.skip("no IPv6 loopback here")
    with contextlib.closing(listener):
        assert listener.family == socket.AF_INET6
