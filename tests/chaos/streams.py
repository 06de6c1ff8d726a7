"""Streams of all kinds against a server: what is asked, what came of it, and whether two rounds brought the
same. Knows HTTP; no rank and no loss.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["Branch", "Load", "Stream", "bodies", "differences"]

_TOPICS = ("rivers", "copper", "sleep", "chess", "bread", "glaciers", "maps", "violins")
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.8, "seed": 5, "n": 2, "top_p": 0.9},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.0, "seed": 8, "presence_penalty": 0.5, "logprobs": 0, "min_tokens": 8},
)


@dataclass
class Branch:
    """One choice of a stream, put together."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    num_logprobs: int = 0
    finish_reason: str | None = None
    num_ends: int = 0


@dataclass
class Stream:
    """What one request brought."""

    branches: dict[int, Branch] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    problem: str | None = None
    is_done: bool = False  # ``[DONE]`` came

    def add(self, chunk: dict[str, Any]) -> None:
        """Take one event in."""
        if "error" in chunk:
            self.problem = json.dumps(chunk["error"])
        if chunk.get("usage"):  # but how much was found in the prefix cache is not the caller's matter
            self.usage = {name: count for name, count in chunk["usage"].items() if name.endswith("_tokens")}
        for choice in chunk.get("choices", ()):
            branch = self.branches.setdefault(choice["index"], Branch())
            branch.text += choice["text"]
            if choice.get("logprobs"):
                branch.tokens += choice["logprobs"]["tokens"]
                branch.num_logprobs += sum(map(len, choice["logprobs"]["top_logprobs"] or ()))
            if choice["finish_reason"] is not None:
                branch.finish_reason = choice["finish_reason"]
                branch.num_ends += 1

    def defect(self, ask: dict[str, Any]) -> str | None:
        """What is wrong with it whatever was expected: cut off, ended twice, counts that do not add up."""
        if self.problem is not None:
            return self.problem
        if self.usage is None or not self.is_done:
            return "cut off"
        if sorted(self.branches) != list(range(ask.get("n", 1))):
            return f"branches {sorted(self.branches)}"
        if any(branch.num_ends != 1 for branch in self.branches.values()):
            return f"ends: {[branch.num_ends for branch in self.branches.values()]}"
        num_tokens = sum(len(branch.tokens) for branch in self.branches.values())
        if "logprobs" in ask and self.usage["completion_tokens"] != num_tokens:
            return f"{num_tokens} log-probabilities for {self.usage['completion_tokens']} tokens"
        return None


def bodies(
    count: int, most_tokens: int, rng: random.Random, words: Sequence[str] = _TOPICS
) -> list[dict[str, Any]]:
    """Requests of all kinds, each the same whenever it is sent."""
    return [
        {
            "model": "m",
            "prompt": "Some notes on "
            + " ".join(rng.choice(words) for _ in range(rng.choice((3, 20, 120))))
            + f", number {index}:",
            "max_tokens": rng.randint(most_tokens // 3, most_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
            **_KINDS[index % len(_KINDS)],
        }
        for index in range(count)
    ]


class Load:
    """Streams under way. Times are of the system's clock, as a log's."""

    def __init__(self, url: str, asks: Sequence[dict[str, Any]]) -> None:
        self._url = url
        self._asks = asks
        self.started_at = 0.0
        self.arrivals: list[float] = []  # of every event with tokens
        self.results: list[Stream] = []

    def run(self) -> None:
        """All of them at once, to their ends."""
        self.started_at = time.time()
        self.results = asyncio.run(self._all())

    @property
    def num_arrived(self) -> int:
        """Events so far."""
        return len(self.arrivals)

    def first_after(self, at: float) -> float | None:
        """When the first token after ``at`` came."""
        return next((arrival for arrival in list(self.arrivals) if arrival > at), None)

    async def _all(self) -> list[Stream]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            return list(await asyncio.gather(*(self._one(client, ask) for ask in self._asks)))

    async def _one(self, client: httpx.AsyncClient, ask: dict[str, Any]) -> Stream:
        stream = Stream()
        try:
            async with client.stream("POST", f"{self._url}/v1/completions", json=ask) as answer:
                if answer.status_code != 200:
                    stream.problem = f"{answer.status_code}: {(await answer.aread())[:300]!r}"
                    return stream
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        stream.is_done = True
                    elif line.startswith("data: "):
                        chunk = json.loads(line[6:])
                        if chunk.get("choices"):
                            self.arrivals.append(time.time())
                        stream.add(chunk)
        except httpx.HTTPError as error:
            stream.problem = repr(error)
        return stream


def differences(
    asks: Sequence[dict[str, Any]], expected: Sequence[Stream], got: Sequence[Stream]
) -> tuple[list[str], list[str]]:
    """Two rounds side by side.

    Returns:
        defects, which nothing excuses; and where whole streams differ in what they say.
    """
    defects, differing = [], []
    for index, (ask, want, have) in enumerate(zip(asks, expected, got, strict=True)):
        defect = have.defect(ask)
        if defect is not None:
            defects.append(f"stream {index}: {defect}")
        elif have != want:
            differing.append(f"stream {index}:\n  {want}\n  {have}")
    return defects, differing
