"""Many more connections at once than a server can serve: everyone is answered, and who is let in, rightly.

    PYTHONPATH=tests python -m chaos.flood [MODEL] [--connections 500] [--queue 64] [--seed N]

500 clients connect at once to ``shoal serve`` with a queue of 64. Each must get 200, 429 or 503 (with
``Retry-After``); who gets 200, the tokens that an undisturbed server gives. Meanwhile ``/health`` answers
within 200 ms, asked by a process of its own, and the server's memory grows by no more than 256 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from support.programs import Server

HEALTH_S = 0.2
HEALTH_PROBLEM = "/health took too long"
GROWTH_BYTES = 256 << 20
MOST_DIFFERENT = 0.01  # of the answers: scores so close that the batch's size decides
_PROBE_PAUSE_S = 0.02


@dataclass
class Report:
    """What the flood did."""

    seed: int
    statuses: dict[int, int] = field(default_factory=dict)
    num_wrong: int = 0
    retry_after_s: tuple[float, float] = (0.0, 0.0)  # least and most
    health_s: dict[str, float] = field(default_factory=dict)
    growth_bytes: int = 0
    duration_s: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ask:
    """One request: a prompt of token ids, greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool

    def body(self) -> dict[str, object]:
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,  # of the chosen tokens: their texts, also where a model has no tokenizer
            "stream": self.stream,
        }


def make_asks(draw: random.Random, count: int, num_prompts: int = 16) -> list[Ask]:
    """``count`` requests over a few prompts, so that each can be checked."""
    prompts = [tuple(draw.randrange(3, 64) for _ in range(draw.randrange(4, 40))) for _ in range(num_prompts)]
    return [Ask(draw.choice(prompts), draw.choice((4, 16)), draw.random() < 0.5) for _ in range(count)]


def found_in(ask: Ask, text: str) -> tuple[list[float], str]:
    """The logprobs of the tokens and the text that an answer holds; a broken one raises."""
    if not ask.stream:
        choices = json.loads(text)["choices"]
    else:
        events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
        assert events[-1] == "[DONE]", text[-200:]
        choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] == "length", choices[-1]
    logprobs = [value for c in choices if c["logprobs"] for value in c["logprobs"]["token_logprobs"]]
    return logprobs, "".join(choice["text"] for choice in choices)


def are_equal(one: tuple[list[float], str], other: tuple[list[float], str]) -> bool:
    """The same text, and the same scores to rounding."""
    return (
        one[1] == other[1]
        and len(one[0]) == len(other[0])
        and all(abs(a - b) < 1e-3 for a, b in zip(one[0], other[0], strict=True))
    )


async def _flood(url: str, asks: list[Ask]) -> list[httpx.Response]:
    everyone = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=everyone, timeout=300) as client:
        at_once = asyncio.Event()

        async def one(ask: Ask) -> httpx.Response:
            await at_once.wait()
            return await client.post(f"{url}/v1/completions", json=ask.body())

        tasks = [asyncio.create_task(one(ask)) for ask in asks]
        at_once.set()
        return await asyncio.gather(*tasks)


def probe(url: str) -> None:
    """Ask for ``/health`` until stdin ends; print how long each answer took, as JSON."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
    took = []
    while not done.wait(_PROBE_PAUSE_S):
        started = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        took.append(time.perf_counter() - started if answer.status == 200 else float("inf"))
    print(json.dumps(took))


@contextmanager
def probed(url: str) -> Iterator[list[float]]:
    """Seconds that ``/health`` took, asked all the time; filled at the end."""
    took: list[float] = []
    command = [sys.executable, "-m", "chaos.flood", "--probe", url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1], text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield took
        process.stdin.close()
        took += json.loads(process.stdout.read())


def memory(process: psutil.Process) -> int:
    """Resident bytes of a process and its children."""
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))


def run(server: Server, num_connections: int, seed: int) -> Report:
    """Flood a server that has just started."""
    report = Report(seed)
    asks = make_asks(random.Random(seed), num_connections)
    undisturbed = {}
    for ask in set(asks):
        answer = httpx.post(f"{server.url}/v1/completions", json=ask.body(), timeout=300)
        undisturbed[ask] = found_in(ask, answer.raise_for_status().text)
    process = psutil.Process(server.process.pid)
    before = memory(process)
    started = time.perf_counter()
    with probed(server.url) as took:
        answers = asyncio.run(_flood(server.url, asks))
    report.duration_s = time.perf_counter() - started
    report.growth_bytes = memory(process) - before
    report.statuses = dict(sorted(Counter(answer.status_code for answer in answers).items()))
    ordered = sorted(took)
    places = {"median": 0.5, "of 100, 99 within": 0.99, "most": 1.0}
    report.health_s = {name: ordered[int(place * (len(ordered) - 1))] for name, place in places.items()}
    refused = [answer for answer in answers if answer.status_code in (429, 503)]
    waits = [float(answer.headers.get("retry-after", "nan")) for answer in refused]
    if waits:
        report.retry_after_s = (min(waits), max(waits))
    served = [(ask, a) for ask, a in zip(asks, answers, strict=True) if a.status_code == 200]
    report.num_wrong = sum(not are_equal(found_in(ask, a.text), undisturbed[ask]) for ask, a in served)
    _judge(report, len(served), waits)
    return report


def _judge(report: Report, num_served: int, waits: list[float]) -> None:
    problems = report.problems
    if not set(report.statuses) <= {200, 429, 503}:
        problems.append("there are other answers than 200, 429 and 503")
    if not num_served:
        problems.append("nobody was served")
    if any(not wait >= 1 for wait in waits):
        problems.append("a refusal does not say when to come again")
    if report.num_wrong > MOST_DIFFERENT * num_served:
        problems.append("answers differ from an undisturbed server's")
    if report.health_s["most"] > HEALTH_S:
        problems.append(HEALTH_PROBLEM)
    if report.growth_bytes > GROWTH_BYTES:
        problems.append("memory grew too much")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--queue", type=int, default=64)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--probe", metavar="URL", help=argparse.SUPPRESS)
    arguments, further = parser.parse_known_args()
    if arguments.probe:
        probe(arguments.probe)
        return 0
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # Pages that are all there at the start: those made behind it would count as growth.
        small = ("--max-num-queued-requests", str(arguments.queue), "--kv-cache-memory-bytes", "100000000")
        options = (arguments.model, *small, *further)
        server = Server(*options, log=Path(folder) / "log")
        try:
            report = run(server, arguments.connections, seed)
        finally:
            server.stop()
    print(json.dumps(vars(report), indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
