"""Requests are sent as the loop says, and streams are read as their clients would."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from shoal.bench.online import OnlineOrder, arrivals, measure_online
from shoal.errors import EngineError, UsageError


class Stream(httpx.AsyncByteStream):
    """Server-sent events; ``before`` is called before each."""

    def __init__(self, events: list[Any], before: Callable[[], Any] | None = None) -> None:
        self._events = events
        self._before = before

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            if self._before is not None:
                await self._before()
            yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 5}}
ANSWER = [piece("a"), piece("bcd"), USAGE, "[DONE]"]


class Server:
    """Answers every request alike, and remembers what was asked."""

    def __init__(self, events: list[Any] = ANSWER, status: int = 200) -> None:
        self._events = events
        self._status = status
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.paths: list[str] = []
        self.running = 0
        self.most_running = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "the-model"}]})
        self.bodies.append(json.loads(request.content))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(5):  # let whoever else may come, come
            await asyncio.sleep(0)
        self.running -= 1
        if self._status != 200:
            return httpx.Response(self._status, text="no")
        return httpx.Response(200, stream=Stream(self._events))

    def measure(self, **changes: Any) -> Any:
        order = OnlineOrder(**{"url": "http://server", "prompts": [str(i) for i in range(6)], **changes})
        return measure_online(order, httpx.MockTransport(self))


def test_every_prompt_is_sent_once_as_a_stream_of_the_model_that_is_listed() -> None:
    server = Server()
    found = server.measure(max_tokens=9, api_key="secret", url="http://server/v1/")
    assert sorted(body["prompt"] for body in server.bodies) == ["0", "1", "2", "3", "4", "5"]
    assert {body["model"] for body in server.bodies} == {"the-model"}
    assert all(body["stream"] and body["max_tokens"] == 9 for body in server.bodies)
    assert all("ignore_eos" not in body for body in server.bodies)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert set(server.paths) == {"/v1/models", "/v1/completions"}
    assert (found.requests, found.failed, found.output_tokens) == (6, 0, 30)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_so_many_requests_running(concurrency: int) -> None:
    server = Server()
    server.measure(concurrency=concurrency)
    assert server.most_running == concurrency


def test_an_open_loop_waits_for_nobody() -> None:
    server = Server()
    server.measure(request_rate=math.inf)
    assert server.most_running == 6


def test_arrivals_are_a_poisson_process_of_that_rate() -> None:
    due = arrivals(4000, 20.0, seed=1)
    assert due[0] == 0 and due == sorted(due)
    gaps = [later - earlier for earlier, later in pairwise(due)]
    mean = math.fsum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    spread = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert spread == pytest.approx(mean, rel=0.1), "an exponential's deviation is its mean"
    assert arrivals(5, 20.0, seed=1) == due[:5]
    assert arrivals(3, math.inf, seed=1) == [0.0, 0.0, 0.0]


def test_a_chat_is_sent_as_messages_and_its_role_is_no_first_token() -> None:
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a"}}]},
        "[DONE]",
    ]
    server = Server(events)
    found = server.measure(endpoint="chat", ignore_eos=True)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "0"}]
    assert server.bodies[0]["ignore_eos"] is True
    assert server.paths[-1] == "/v1/chat/completions"
    assert found.output_tokens == 6, "without usage the pieces count"
    assert found.itl_ms is None


def test_a_request_that_fails_is_counted_and_all_failing_is_an_error() -> None:
    class Sometimes(Server):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            answer = await super().__call__(request)
            return httpx.Response(429, text="busy") if len(self.bodies) == 2 else answer

    found = Sometimes().measure()
    assert (found.failed, found.first_error) == (1, "429: busy")
    with pytest.raises(EngineError, match="all 6 requests failed, the first with: 500: no"):
        Server(status=500).measure()
    with pytest.raises(EngineError, match="out of memory"):
        Server([{"error": {"message": "out of memory"}}]).measure()
    with pytest.raises(EngineError, match="no text"):
        Server(["[DONE]"]).measure()


def test_a_server_that_is_not_there_is_said() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(EngineError, match="http://server does not list its models"):
        measure_online(OnlineOrder("http://server", ["a"]), httpx.MockTransport(refuse))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"url": "server:8000"}, "url"),
        ({"prompts": []}, "num_prompts"),
        ({"concurrency": 0}, "concurrency"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": 1.0, "concurrency": 2}, "request_rate"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_by_its_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        Server().measure(**wrong)
    assert caught.value.field == field
