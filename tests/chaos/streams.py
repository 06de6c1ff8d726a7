"""Streams of all kinds against a server: what is asked, what came of it, and whether it is what was expected.
Knows HTTP; no rank and no loss.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["Asks", "Branch", "Stream", "Traffic", "asks_of"]

_TOPICS = ("rivers", "copper", "sleep", "chess", "bread", "glaciers", "maps", "violins")
_NEUTRAL: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.8, "seed": 5, "n": 2, "top_p": 0.9},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.0, "seed": 8, "presence_penalty": 0.5, "logprobs": 0, "min_tokens": 8},
)
_LENGTHS = (3, 20, 100)  # of prompts, in words
_LONG = 4  # prompts of a burst
_LONG_TOKENS = (4, 12)  # what they ask for


@dataclass
class Branch:
    """One choice of a stream, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
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
            branch.token_ids += choice["token_ids"]
            if choice.get("logprobs"):
                branch.tokens += choice["logprobs"]["tokens"]
                branch.num_logprobs += sum(map(len, choice["logprobs"]["top_logprobs"] or ()))
            if choice["finish_reason"] is not None:
                branch.finish_reason = choice["finish_reason"]
                branch.num_ends += 1

    def defect(self, ask: Mapping[str, Any]) -> str | None:
        """What is wrong with it whatever was expected: cut off, ended twice, counts that do not add up."""
        if self.problem is not None:
            return self.problem
        if self.usage is None or not self.is_done:
            return "cut off"
        if sorted(self.branches) != list(range(ask.get("n", 1))):
            return f"branches {sorted(self.branches)}"
        branches = self.branches.values()
        if any(branch.num_ends != 1 for branch in branches):
            return f"ends: {[branch.num_ends for branch in branches]}"
        if self.usage["completion_tokens"] != (count := sum(len(branch.token_ids) for branch in branches)):
            return f"{count} tokens, and {self.usage['completion_tokens']} in the usage"
        return next(filter(None, (_miscounted(branch, ask) for branch in branches)), None)


def _miscounted(branch: Branch, ask: Mapping[str, Any]) -> str | None:
    """What does not add up in one choice: its tokens, its end, its log-probabilities."""
    count, most = len(branch.token_ids), ask["max_tokens"]
    ends = {"length": count == most, "stop": ask.get("min_tokens", 0) <= count <= most}
    if not ends.get(str(branch.finish_reason), False):
        return f"{count} of {most} tokens, and ended by {branch.finish_reason!r}"
    if "logprobs" in ask and len(branch.tokens) != count:
        return f"{len(branch.tokens)} log-probabilities for {count} tokens"
    return None


@dataclass(frozen=True, slots=True)
class Asks:
    """Requests, each the same whenever it is sent. The first ``num_flowing`` are for streams that follow each
    other; the others have long prompts, and are sent a few at once.
    """

    bodies: list[dict[str, Any]]
    num_flowing: int

    def burst(self, number: int) -> range:
        """The long ones to be sent together. Two bursts take turns: what the one before left in the prefix
        cache is not asked for.
        """
        start = self.num_flowing + _LONG * (number % 2)
        return range(start, start + _LONG)


def asks_of(
    count: int, most_tokens: int, long_words: int, rng: random.Random, words: Sequence[str] = _TOPICS
) -> Asks:
    """Requests of all kinds, ``count`` of them to follow each other.

    Args:
        most_tokens: of an output.
        long_words: of a long prompt.
    """

    def body(index: int, num_words: int, max_tokens: int) -> dict[str, Any]:
        kind = _KINDS[index % len(_KINDS)]
        return {
            "model": "m",
            "prompt": f"{rng.choice(words)} number {index}, notes on "
            + " ".join(rng.choice(words) for _ in range(num_words)),
            "max_tokens": max(max_tokens, kind.get("min_tokens", 1)),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **_NEUTRAL,
            **kind,
        }

    bodies = [body(i, rng.choice(_LENGTHS), rng.randint(most_tokens // 3, most_tokens)) for i in range(count)]
    bodies += [body(count + i, long_words, rng.randint(*_LONG_TOKENS)) for i in range(2 * _LONG)]
    return Asks(bodies, count)


@dataclass(eq=False)
class _Open:
    """A stream that has not ended."""

    index: int  # of its ask
    opened_at: float
    latest: float = 0.0  # event with tokens


class Traffic:
    """Streams under way, on a thread of its own. Times are of the system's clock, as a log's.

    Args:
        ended: told of every stream that ends, with its ask's index, on that thread.
    """

    def __init__(self, url: str, asks: Asks, ended: Callable[[int, Stream], None]) -> None:
        self.arrivals: list[float] = []  # of every event with tokens
        self._url = url
        self._asks = asks
        self._ended = ended
        self._open: set[_Open] = set()
        self._is_flowing = False
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))
        self._thread = threading.Thread(target=self._loop.run_forever, name="traffic")
        self._thread.start()

    def flow(self) -> float:
        """Send all flowing asks at once, and whenever one ends the next in turn; returns when that was."""
        started_at = time.time()
        if not self._is_flowing:
            self._is_flowing = True
            self._send((self._turn() for _ in range(self._asks.num_flowing)), is_followed=True)
        return started_at

    def drain(self) -> None:
        """Let the streams that are open end, with no others after them."""
        self._is_flowing = False

    def send(self, indices: Iterable[int]) -> None:
        """Send these asks at once, and none after them."""
        self._send(indices, is_followed=False)

    def close(self) -> None:
        """Cut off what is open, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def num_open(self, indices: Container[int] | None = None) -> int:
        """Streams that have not ended; of these asks only, if given."""
        return sum(indices is None or one.index in indices for one in list(self._open))

    def num_fresh(self) -> int:
        """Streams that have had no token yet."""
        return sum(not one.latest for one in list(self._open))

    def num_silent_since(self, at: float) -> int:
        """Streams that were open at a moment, and have had no token since."""
        return sum(one.opened_at < at and one.latest < at for one in list(self._open))

    def first_after(self, at: float) -> float | None:
        """When the first token after a moment came."""
        arrivals = list(self.arrivals)
        place = bisect_right(arrivals, at)
        return arrivals[place] if place < len(arrivals) else None

    def _turn(self) -> int:
        index, self._next = self._next, (self._next + 1) % self._asks.num_flowing
        return index

    def _send(self, indices: Iterable[int], is_followed: bool) -> None:
        async def send() -> None:
            for index in indices:
                self._start(index, is_followed)

        asyncio.run_coroutine_threadsafe(send(), self._loop).result()

    def _start(self, index: int, is_followed: bool) -> None:
        one = _Open(index, time.time())
        self._open.add(one)
        task = self._loop.create_task(self._run(one, is_followed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, one: _Open, is_followed: bool) -> None:
        stream = Stream()
        try:
            await self._read(one, stream)
        except httpx.HTTPError as error:
            stream.problem = repr(error)
        self._ended(one.index, stream)
        if is_followed and self._is_flowing:
            self._start(self._turn(), is_followed=True)
        self._open.discard(one)

    async def _read(self, one: _Open, stream: Stream) -> None:
        ask = self._asks.bodies[one.index]
        async with self._client.stream("POST", f"{self._url}/v1/completions", json=ask) as answer:
            if answer.status_code != 200:
                stream.problem = f"{answer.status_code}: {(await answer.aread())[:300]!r}"
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    stream.is_done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if chunk.get("choices"):
                        one.latest = time.time()
                        self.arrivals.append(one.latest)
                    stream.add(chunk)

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
