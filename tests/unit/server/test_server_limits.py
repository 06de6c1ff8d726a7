"""Nothing a client sends is without bound: each refusal names the field, before anything is built of it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace
from urllib.parse import quote

import pytest
from server_fake import SETTINGS, FakeFrontend, live_server

from shoal.errors import QueueFullError
from shoal.server import body
from shoal.server.settings import ServerSettings

USER = {"role": "user", "content": "hi"}
SMALL = replace(SETTINGS, max_body_bytes=200)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": ["a", "b" * 1025]}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"prompt": ["a"] * 17, "n": 128}, "n"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1.5}, "timeout"),
        ({"timeout": "1"}, "timeout"),
        ({"timeout": True}, "timeout"),
    ],
)
def test_a_field_beyond_its_limit_is_named(ask, change, param):
    frontend = FakeFrontend()
    answer = ask("POST", "/v1/completions", frontend=frontend, json={"prompt": "a", **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not frontend.seen


def test_what_reaches_a_limit_is_served(ask):
    request = {
        "prompt": "a",
        "stop": ["s" * 1024] * 64,
        "stop_token_ids": [1] * 1024,
        "logit_bias": {str(token): 1 for token in range(1024)},
        "timeout": 1e9,
    }
    assert ask("POST", "/v1/completions", json=request).status_code == 200


def test_too_many_messages_are_refused_without_a_look_at_each(ask):
    content = b'{"messages": [' + b"1," * 100_000 + b"1]}"
    started = time.perf_counter()
    answer = ask("POST", "/v1/chat/completions", content=content)
    assert answer.json()["error"]["param"] == "messages"
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    "content",
    [b'{"a":1' + b',"a":1' * 100_000 + b"}", b"[" + b"1," * 1_000_001 + b"1]", b"[" + b"[]" * 100_000 + b"]"],
    ids=["fields", "items", "lists"],
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(ask, content, monkeypatch):
    monkeypatch.setattr("shoal.server.schemas.from_json", None)
    answer = ask("POST", "/v1/completions", content=content)
    assert answer.status_code == 400 and "the body holds too many" in answer.json()["error"]["message"]


def test_a_body_of_too_many_fields_is_refused_before_each_is_looked_at(ask):
    answer = ask("POST", "/v1/completions", json={f"field{index}": 1 for index in range(1001)})
    assert answer.status_code == 400 and "too many fields" in answer.json()["error"]["message"]


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_body_beyond_the_limit_is_a_413_and_one_at_the_limit_is_read(ask, in_chunks):
    def asked(size: int):
        content = json.dumps({"prompt": "a"}).encode().ljust(size)
        chunks = [content[start : start + 50] for start in range(0, size, 50)]

        async def stream():
            for chunk in chunks:
                yield chunk

        return ask("POST", "/v1/completions", settings=SMALL, content=stream() if in_chunks else content)

    assert asked(200).status_code == 200
    refused = asked(201)
    assert refused.status_code == 413 and "max-body-bytes" in refused.json()["error"]["message"]
    assert refused.headers["connection"] == "close"


def test_a_client_that_asks_before_it_sends_too_much_is_told_at_once():
    with live_server(FakeFrontend(), SMALL) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
                b"Expect: 100-continue\r\n\r\n"
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_a_408(monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    with live_server(FakeFrontend()) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_an_error_does_not_repeat_all_that_was_sent(ask):
    answer = ask("POST", "/v1/completions", json={"prompt": "a", "model": "m" * 100_000})
    assert answer.status_code == 404 and len(answer.content) < 1200


def test_a_model_name_is_compared_and_never_looked_up(ask, tmp_path):
    settings = ServerSettings(model=str(tmp_path))
    same = f"{tmp_path}/../{tmp_path.name}"
    for name in (same, f"{tmp_path}/.", "../../etc/passwd", "/etc/passwd"):
        assert ask("GET", f"/v1/models/{quote(name, safe='')}", settings=settings).status_code == 404
        refused = ask("POST", "/v1/completions", settings=settings, json={"prompt": "a", "model": name})
        assert refused.status_code == 404
    assert ask("GET", f"/v1/models/{quote(str(tmp_path), safe='')}", settings=settings).status_code == 200


def test_a_full_queue_refuses_before_the_prompt_is_rendered_and_says_when_to_come_again(ask):
    frontend = FakeFrontend()
    frontend.is_full = True
    answer = ask("POST", "/v1/chat/completions", frontend=frontend, json={"messages": [USER]})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "queue_full"
    assert not frontend.rendered


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 2])
def test_the_clients_timeout_ends_the_request(ask, stream, hang_after):
    frontend = FakeFrontend(hang_after=hang_after)
    request = {"prompt": ["a", "b"], "timeout": 0.2, "stream": stream}
    started = time.perf_counter()
    answer = ask("POST", "/v1/completions", frontend=frontend, json=request)
    assert time.perf_counter() - started < 2
    if stream and hang_after:
        assert answer.status_code == 200
        last, done = answer.text.strip().split("\n\n")[-2:]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert done == "data: [DONE]"
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert error["code"] == "request_timeout" and "its timeout of 0.2 seconds" in error["message"]
    assert not frontend.running and len(frontend.aborted) == 2


def test_the_shorter_of_the_two_timeouts_counts(ask):
    for ours, theirs, told in ((0.05, 60, "the server's limit of 0.05"), (60, 0.05, "its timeout of 0.05")):
        answer = ask(
            "POST",
            "/v1/completions",
            frontend=FakeFrontend(hang_after=0),
            settings=replace(SETTINGS, request_timeout_s=ours),
            json={"prompt": "a", "timeout": theirs},
        )
        assert answer.status_code == 504 and told in answer.json()["error"]["message"]


def test_what_was_not_served_is_counted_by_reason():
    from httpx import ASGITransport, AsyncClient

    from shoal.server.app import create_app

    async def scraped() -> str:
        frontend = FakeFrontend(hang_after=1)
        app = create_app(frontend, SETTINGS)
        async with AsyncClient(transport=ASGITransport(app), base_url="http://test") as client:
            await client.post("/v1/completions", json={"prompt": "a", "timeout": 0.01})
            await client.post("/v1/completions", json={"prompt": "a", "timeout": 0.01, "stream": True})
            await client.post("/v1/completions", json={"prompt": "a", "n": 0})
            frontend.refusal = QueueFullError("full")
            await client.post("/v1/completions", json={"prompt": "a"})
            return (await client.get("/metrics")).text

    text = asyncio.run(scraped())
    for reason, count in (
        ("request_timeout", 2),
        ("queue_full", 1),
        ("invalid_request", 1),
        ("client_gone", 0),
    ):
        assert f'shoal:request_failures_total{{model_name="demo",reason="{reason}"}} {count}.0' in text
