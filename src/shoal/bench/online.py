"""A running OpenAI-compatible server under load, as its clients see it: time to first token, between tokens,
to the end, and how much of it was good enough. Knows HTTP and no engine; prints nothing.

Closed loop: so many clients, each sends its next request when the last one ended. Open loop: requests come
when they come, whatever the server does (Poisson arrivals), which is what shows a queue that grows.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from shoal.bench.latency import Sample, Summary, Target, summarise
from shoal.errors import EngineError, UsageError

__all__ = ["OnlineOrder", "arrivals", "measure_online"]


@dataclass(frozen=True, slots=True)
class OnlineOrder:
    """What to send, and how fast."""

    url: str  # http://host:port, with or without /v1
    prompts: Sequence[str]
    model: str | None = None  # as the server calls it; None: the first it lists
    api_key: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    max_tokens: int = 64
    temperature: float = 0.0
    ignore_eos: bool = False  # an extension that not every server takes
    concurrency: int | None = None  # closed loop, so many clients; 1 if there is no rate either
    request_rate: float | None = None  # open loop, requests a second; inf: all at once
    seed: int = 0  # of the arrivals
    timeout_s: float = 600.0  # of one request
    targets: Sequence[Target] = field(default_factory=tuple)

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            UsageError: no prompts, two loops at once, or a number out of range.
        """
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"url: must begin with http:// or https://, got {self.url!r}", field="url")
        if not self.prompts:
            raise UsageError("num_prompts: at least 1", field="num_prompts")
        if self.concurrency is not None and self.request_rate is not None:
            raise UsageError(
                "request_rate: a rate is an open loop and concurrency a closed one; set one",
                field="request_rate",
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"concurrency: at least 1, got {self.concurrency}", field="concurrency")
        if self.request_rate is not None and not self.request_rate > 0:
            raise UsageError(f"request_rate: above 0, got {self.request_rate}", field="request_rate")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens: at least 1, got {self.max_tokens}", field="max_tokens")


def measure_online(order: OnlineOrder, transport: Any = None) -> Summary:
    """Send everything, and sum up what came back.

    Args:
        order: what to send.
        transport: an ``httpx.AsyncBaseTransport`` in the place of the network.

    Raises:
        UsageError: the order cannot be carried out.
        EngineError: the server is not there, lists no model, or failed every request.
    """
    order.check()
    samples, seconds = asyncio.run(_send_all(order, transport))
    failed = [sample.error for sample in samples if sample.error is not None]
    if len(failed) == len(samples):
        raise EngineError(f"all {len(samples)} requests failed, the first with: {failed[0]}")
    return summarise(samples, seconds, order.targets)


async def _send_all(order: OnlineOrder, transport: Any) -> tuple[list[Sample], float]:
    import httpx

    headers = {"Authorization": f"Bearer {order.api_key}"} if order.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = order.url.rstrip("/").removesuffix("/v1") + "/v1/"
    is_here = urlsplit(base).hostname in ("127.0.0.1", "localhost", "::1")  # no proxy leads here
    async with httpx.AsyncClient(
        base_url=base,
        headers=headers,
        timeout=order.timeout_s,
        limits=limits,
        transport=transport,
        trust_env=not is_here,
    ) as client:
        model = order.model or await _first_model(client, order.url)
        send: Callable[[str], Any] = lambda prompt: _send(client, order, model, prompt)  # noqa: E731
        started = time.perf_counter()
        if order.request_rate is not None:
            samples = await _open_loop(order, send)
        else:
            samples = await _closed_loop(order, send)
        return samples, time.perf_counter() - started


async def _first_model(client: Any, url: str) -> str:
    import httpx

    try:
        answer = await client.get("models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise EngineError(f"{url} does not list its models: {error!r}") from error


async def _closed_loop(order: OnlineOrder, send: Callable[[str], Any]) -> list[Sample]:
    samples: list[Sample | None] = [None] * len(order.prompts)
    waiting = iter(enumerate(order.prompts))

    async def client() -> None:
        for index, prompt in waiting:
            samples[index] = await send(prompt)

    await asyncio.gather(*(client() for _ in range(order.concurrency or 1)))
    return [sample for sample in samples if sample is not None]


async def _open_loop(order: OnlineOrder, send: Callable[[str], Any]) -> list[Sample]:
    """Each request at its own time, counted from the start, so that lateness does not add up."""
    assert order.request_rate is not None
    started = time.perf_counter()

    async def at(due_s: float, prompt: str) -> Sample:
        await asyncio.sleep(max(0.0, started + due_s - time.perf_counter()))
        sample: Sample = await send(prompt)
        return sample

    due = arrivals(len(order.prompts), order.request_rate, order.seed)
    return list(await asyncio.gather(*map(at, due, order.prompts)))


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests come: a Poisson process, its first arrival at 0.

    Args:
        count: how many.
        rate: requests a second; inf: all at 0.
        seed: the same for the same arrivals.
    """
    draw = random.Random(seed)
    due = [0.0] * count
    if not math.isinf(rate):
        for index in range(1, count):
            due[index] = due[index - 1] + draw.expovariate(rate)
    return due


async def _send(client: Any, order: OnlineOrder, model: str, prompt: str) -> Sample:
    import httpx

    started = time.perf_counter()
    stamps: list[float] = []
    tokens: int | None = None
    try:
        async with client.stream("POST", _path(order), json=_body(order, model, prompt)) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                return Sample.failed(f"{answer.status_code}: {text[:200]}")
            async for event in _events(answer):
                if "error" in event:
                    return Sample.failed(str(event["error"]))
                if _has_text(event):
                    stamps.append(time.perf_counter() - started)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except (httpx.HTTPError, ValueError) as error:
        return Sample.failed(f"{type(error).__name__}: {error}")
    if not stamps:
        return Sample.failed("the answer has no text")
    return Sample(tuple(stamps), time.perf_counter() - started, tokens or len(stamps))


def _path(order: OnlineOrder) -> str:
    return "chat/completions" if order.endpoint == "chat" else "completions"


def _body(order: OnlineOrder, model: str, prompt: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": order.max_tokens,
        "temperature": order.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if order.ignore_eos:
        body["ignore_eos"] = True
    if order.endpoint == "chat":
        return {**body, "messages": [{"role": "user", "content": prompt}]}
    return {**body, "prompt": prompt}


async def _events(answer: Any) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON of server-sent events, up to ``[DONE]``."""
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def _has_text(event: Mapping[str, Any]) -> bool:
    """Whether an event brings output. The first of a chat, which only names the role, does not."""
    for choice in event.get("choices", ()):
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            return True
    return False
