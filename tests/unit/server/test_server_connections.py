"""A connection that says nothing, or takes nothing, is not held for good; too many are told so."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from dataclasses import replace

import httpx
import pytest
from server_fake import SETTINGS, FakeFrontend, live_server

from shoal.server.connections import _Turns, allow_descriptors


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def has_ended(connection: socket.socket) -> bool:
    """Whether the server ends the connection within five seconds, sending nothing."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 1000,
    ],
)
def test_a_connection_without_a_whole_head_is_closed(sent):
    with live_server(FakeFrontend(), head_timeout_s=0.1) as url, connect(url) as connection:
        connection.sendall(sent)
        assert has_ended(connection)


def test_a_kept_connection_is_closed_if_its_next_request_does_not_come_whole():
    with live_server(FakeFrontend(), head_timeout_s=0.2) as url, connect(url) as connection:
        for _ in range(2):  # a whole request is answered however late in the connection's life
            time.sleep(0.3 if _ else 0)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while b'{"status":"ok"}' not in answer:
                answer += connection.recv(1000)
        connection.sendall(b"GET /he")
        assert has_ended(connection)


def test_an_answer_that_takes_long_to_begin_is_not_cut():
    frontend = FakeFrontend(hang_after=0)
    with live_server(frontend, head_timeout_s=0.05, write_timeout_s=0.05) as url, connect(url) as connection:
        body = b'{"prompt": "a", "max_tokens": 2}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body)
        assert frontend.hanging.wait(5)
        time.sleep(0.2)
        assert frontend.loop is not None
        frontend.loop.call_soon_threadsafe(frontend.go_on.set)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


class Endless(FakeFrontend):
    """Words of 10,000 letters, so that a socket's buffers fill up."""

    def __init__(self) -> None:
        super().__init__()
        self.max_model_len = 1 << 20

    def _delta(self, *arguments):
        delta = super()._delta(*arguments)
        delta.outputs[0].text *= 2500
        return delta


def test_a_client_that_takes_nothing_of_its_answer_is_cut_off_and_its_request_aborted():
    frontend = Endless()
    with live_server(frontend, write_timeout_s=0.3) as url, connect(url) as connection:
        body = b'{"prompt": "a", "max_tokens": 100000, "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body)
        assert frontend.abort_seen.wait(20)
        assert httpx.get(f"{url}/health").status_code == 200
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(1 << 20):
                received = (received + chunk)[-50:]
        assert received and b"[DONE]" not in received


def test_a_client_that_is_slow_but_takes_something_is_served_to_the_end():
    frontend = Endless()
    with live_server(frontend, write_timeout_s=0.3) as url, connect(url) as connection:
        body = b'{"prompt": "a", "max_tokens": 1000, "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body)
        size, tail = 0, b""
        while not tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            if size < 2_000_000:  # then it hurries up: the test's time is short
                time.sleep(0.01)
            chunk = connection.recv(1 << 15)
            assert chunk, f"ended after {size} bytes"
            size, tail = size + len(chunk), (tail + chunk)[-50:]
        assert size > 7_500_000


def test_beyond_the_limit_requests_are_refused_and_health_is_still_told():
    settings = replace(SETTINGS, max_connections=3)
    with live_server(FakeFrontend(), settings) as url, contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(connect(url))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert httpx.get(f"{url}/health").status_code == 200


def test_descriptors_are_asked_for_as_far_as_the_system_allows():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, limits[1]))
        assert allow_descriptors(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 400 + 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_fewer_connections_where_there_are_not_enough_descriptors(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert allow_descriptors(2000) == 488


def test_of_requests_that_come_at_one_moment_a_few_are_begun_at_a_time_and_in_order():
    done = []

    async def test():
        loop, turns = asyncio.get_running_loop(), _Turns()
        for number in range(20):
            turns.add(loop, lambda number=number: done.append(number))
        for _ in range(6):
            await asyncio.sleep(0)
            done.append("others")

    asyncio.run(test())
    numbers = [entry for entry in done if entry != "others"]
    assert numbers == list(range(20))
    rounds = "".join("o" if entry == "others" else "x" for entry in done).split("o")
    assert max(map(len, rounds)) == 8 and done.index("others") < 8


def test_a_request_that_waits_for_its_turn_is_read_whole_and_health_goes_before_it():
    """Its head and its body come in two pieces while many others come at one moment."""
    body = b'{"prompt": "a", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with live_server(FakeFrontend()) as url, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(url)) for _ in range(60)]
        for connection in connections:
            connection.sendall(head)
        for connection in connections:
            connection.sendall(body)
        assert httpx.get(f"{url}/health").status_code == 200
        for connection in connections:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_body_of_tiny_chunks_is_read_in_pieces_and_whole():
    prompt = "a" * 30_000
    chunks = b"".join(
        b"1\r\n%c\r\n" % byte for byte in b'{"prompt": "%s", "max_tokens": 1}' % prompt.encode()
    )
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    frontend = FakeFrontend()
    frontend.max_model_len = 40_000
    with live_server(frontend) as url, connect(url) as connection:
        connection.sendall(head + chunks + b"0\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    assert frontend.seen[0][0] == prompt
