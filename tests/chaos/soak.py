"""Mixed traffic for minutes against ``shoal serve``, much of it ill-behaved; at the end nothing is left.

    PYTHONPATH=tests python -m chaos.soak [MODEL] [--minutes 20] [--clients 12] [--seed N] [-- SERVE OPTIONS]

Clients complete, stream, hang up, let requests time out, stop reading, send what is refused, reuse ids and
ask for more than the KV cache holds at once, so that requests are preempted. After each round, once the
last request is gone: no request runs or waits, no KV block is held, and the same prompt gives the same
tokens. From the first round (warm-up) to the last: no thread, process, descriptor or segment of shared
memory more, and resident memory grew by less than 3%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.programs import Server, shared_memory, wait_until

GROWTH = 0.03
_ROUNDS = 6
_READ_S = 60.0
_SETTLE_S = 15.0
_QUIET_S = 30.0  # for the last requests to be noticed gone

Behaviour = Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]


@dataclass(frozen=True)
class Footprint:
    """What a server holds while nobody asks anything."""

    rss_bytes: int
    num_threads: int
    num_descriptors: int
    num_processes: int
    segments: frozenset[str]


@dataclass
class Report:
    """What was done, and what is left of it."""

    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    rss_bytes: list[int] = field(default_factory=list)  # after each round
    problems: list[str] = field(default_factory=list)


def footprint(server: Server) -> Footprint:
    """Of the server and its ranks."""
    process = psutil.Process(server.process.pid)
    family = [process, *process.children(recursive=True)]
    return Footprint(
        rss_bytes=sum(p.memory_info().rss for p in family),
        num_threads=sum(p.num_threads() for p in family),
        num_descriptors=sum(p.num_fds() for p in family),
        num_processes=len(family),
        segments=frozenset(shared_memory()),
    )


def metrics(url: str) -> dict[str, float]:
    """Every series without its labels; equal names are summed."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=_READ_S).text.splitlines():
        if not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


# What clients do; each returns what came of it.


def _ask(draw: random.Random, **further: Any) -> dict[str, Any]:
    length = draw.choice((4, 20, 60))
    return {
        "prompt": [draw.randrange(3, 64) for _ in range(length)],
        "max_tokens": draw.choice((1, 8, 40)),
        "temperature": draw.choice((0, 1)),
        "ignore_eos": True,
        **further,
    }


async def _whole(client: httpx.AsyncClient, draw: random.Random) -> str:
    answer = await client.post("/v1/completions", json=_ask(draw, n=draw.choice((1, 1, 4)), logprobs=2))
    return f"whole {answer.status_code}"


async def _streamed(client: httpx.AsyncClient, draw: random.Random) -> str:
    async with client.stream("POST", "/v1/completions", json=_ask(draw, stream=True)) as answer:
        text = (await answer.aread()).decode()
    assert answer.status_code != 200 or text.endswith("data: [DONE]\n\n"), text[-200:]
    return f"streamed {answer.status_code}"


async def _hangs_up(client: httpx.AsyncClient, draw: random.Random) -> str:
    ask = _ask(draw, stream=draw.random() < 0.5, max_tokens=200)
    try:
        async with asyncio.timeout(draw.uniform(0.001, 0.3)):
            await client.post("/v1/completions", json=ask)
    except TimeoutError:
        return "hung up"
    return "hung up too late"


async def _times_out(client: httpx.AsyncClient, draw: random.Random) -> str:
    ask = _ask(draw, stream=draw.random() < 0.5, max_tokens=200, timeout=draw.uniform(0.001, 0.2))
    answer = await client.post("/v1/completions", json=ask)
    return f"timed out {answer.status_code}"


async def _refused(client: httpx.AsyncClient, draw: random.Random) -> str:
    wrong = draw.choice(
        ({"n": 0}, {"prompt": []}, {"prompt": [10**9]}, {"prompt": [5] * 5000}, {"stop": [""]}, {"top_p": 7})
    )
    answer = await client.post("/v1/completions", json=_ask(draw, **wrong))
    if answer.status_code == 429:
        return "refused 429"  # the queue was full already
    assert answer.status_code == 400, answer.text
    return "refused"


async def _same_id(client: httpx.AsyncClient, draw: random.Random) -> str:
    headers = {"X-Request-Id": f"same-{draw.randrange(3)}"}
    answer = await client.post("/v1/completions", json=_ask(draw), headers=headers)
    return f"same id {answer.status_code}"


async def _stops_reading(client: httpx.AsyncClient, draw: random.Random) -> str:
    ask = _ask(draw, stream=True, max_tokens=200)
    async with client.stream("POST", "/v1/completions", json=ask) as answer:
        async for _ in answer.aiter_raw(1):
            break
        await asyncio.sleep(draw.uniform(0, 1))  # a pause of the client's, not a wait for anything
    return f"stopped reading {answer.status_code}"


_BEHAVIOURS: tuple[tuple[Behaviour, int], ...] = (
    (_whole, 4),
    (_streamed, 4),
    (_hangs_up, 3),
    (_times_out, 2),
    (_refused, 1),
    (_same_id, 1),
    (_stops_reading, 1),
)
_EXPECTED = frozenset((200, 409, 429, 504))
CHECKING = ("--log-level", "debug")  # an idle engine then checks its pool, prefix index and queue


async def _traffic(url: str, seed: int, num_clients: int, seconds: float, outcomes: Counter[str]) -> None:
    ends = time.monotonic() + seconds

    async def one(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        kinds, weights = zip(*_BEHAVIOURS, strict=True)
        while time.monotonic() < ends:
            async with httpx.AsyncClient(base_url=url, timeout=_READ_S) as client:
                for _ in range(draw.randrange(1, 8)):
                    outcomes[await draw.choices(kinds, weights)[0](client, draw)] += 1

    await asyncio.gather(*(one(number) for number in range(num_clients)))


def _fixed_answer(url: str) -> Any:
    ask = {"prompt": [5, 7, 11, 13], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=_READ_S).raise_for_status().json()
    return answer["choices"][0]["text"], answer["choices"][0]["logprobs"]["tokens"]


def _settled(server: Server, first: Footprint | None) -> Footprint:
    """What the server holds once connections that were just closed are gone, or after some seconds."""
    ends = time.monotonic() + _SETTLE_S
    while True:
        now = footprint(server)
        is_more = first is not None and (
            now.num_descriptors > first.num_descriptors or now.num_threads > first.num_threads
        )
        if not is_more or time.monotonic() > ends:
            return now
        time.sleep(0.2)


def _is_quiet(url: str) -> bool:
    now = metrics(url)
    gauges = ("num_requests_running", "num_requests_waiting", "num_queued_tokens", "kv_cache_usage_perc")
    return not any(now[f"shoal:{name}"] for name in gauges)


def run(server: Server, minutes: float, num_clients: int, seed: int) -> Report:
    """Soak a server that has just started."""
    report = Report(seed)
    expected = _fixed_answer(server.url)
    first: Footprint | None = None
    for number in range(_ROUNDS):
        seconds = minutes * 60 / _ROUNDS
        asyncio.run(_traffic(server.url, seed + number, num_clients, seconds, report.outcomes))
        wait_until(lambda: _is_quiet(server.url), _QUIET_S, "no request is left, and no block is held")
        if _fixed_answer(server.url) != expected:
            report.problems.append(f"round {number}: the same prompt gave other tokens")
        now = _settled(server, first)
        report.rss_bytes.append(now.rss_bytes)
        first = first or now
    assert first is not None
    report.preemptions = int(metrics(server.url)["shoal:num_preemptions_total"])
    _judge(report, first, now)
    return report


def _judge(report: Report, first: Footprint, last: Footprint) -> None:
    problems = report.problems
    for name in ("num_threads", "num_descriptors", "num_processes"):
        before, after = getattr(first, name), getattr(last, name)
        if after > before:
            problems.append(f"{name} grew from {before} to {after}")
    if not last.segments <= first.segments:
        problems.append(f"segments were left: {sorted(last.segments - first.segments)}")
    if last.rss_bytes > (1 + GROWTH) * first.rss_bytes:
        problems.append(f"resident memory grew from {first.rss_bytes} to {last.rss_bytes} bytes")
    statuses = {int(word) for outcome in report.outcomes for word in outcome.split() if word.isdigit()}
    if not statuses <= _EXPECTED:
        problems.append(f"unexpected answers: {sorted(statuses - _EXPECTED)}")
    if not report.preemptions:
        problems.append("nobody was preempted: the soak was too gentle")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=None)
    arguments, further = parser.parse_known_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        small = (
            "--num-gpu-blocks-override",
            "40",
            "--max-model-len",
            "512",
            "--max-num-queued-requests",
            "8",
            *CHECKING,
        )
        server = Server(arguments.model, *small, *further, log=Path(folder) / "log")
        try:
            report = run(server, arguments.minutes, arguments.clients, seed)
        finally:
            status = server.stop()
    if status:
        report.problems.append(f"the server ended with status {status}")
    print(json.dumps(vars(report), indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
