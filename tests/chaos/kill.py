"""Ranks that die, stop, raise or hang under load: every stream ends as if nothing had happened.

    PYTHONPATH=tests python -m chaos.kill [MODEL] [-tp N] [--way WAY] [--rounds 20] [--seed N]

In each round a number of streams of different lengths and kinds (greedy, sampled, with penalties, ``n=2``,
with log-probabilities) run against ``shoal serve``, and a random rank is lost at a random moment: while
nothing runs, before the first token, in the middle, or while ranks that were lost before are started. Texts,
tokens, finish reasons, log-probabilities and usage must be those of an undisturbed round. Printed are how
long it took to notice, and from then to the next token, beside a cold start of the same ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.programs import Server, environment, status_of, wait_until

KILL_NOTICED_S = 1.0
SLOWER_THAN_COLD_S = 3.0
MOST_DIFFERENT = 0.01  # of the streams: scores so close that the batch's composition decides
MOMENTS = ("idle", "prefill", "decode", "recovery")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_TOPICS = ("rivers", "copper", "sleep", "chess", "bread", "glaciers", "maps", "violins")


@dataclass
class Branch:
    """One choice of a stream, put together."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    num_logprobs: int = 0
    finish_reason: str | None = None


@dataclass
class Stream:
    """What one request brought."""

    branches: dict[int, Branch] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    problem: str | None = None

    def add(self, chunk: dict[str, Any]) -> None:
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
            branch.finish_reason = choice["finish_reason"] or branch.finish_reason


@dataclass
class Report:
    """What the losses did."""

    seed: int
    cold_s: float = 0.0
    noticed_s: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    num_streams: int = 0
    num_different: int = 0
    num_restarts: int = 0
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"seed {self.seed}: {self.num_streams} streams, {self.num_different} different, "
            f"{self.num_restarts} restarts",
            f"noticed after (s):          {_spread(self.noticed_s)}",
            f"then the next token (s):    {_spread(self.recovered_s)}",
            f"a cold start of ranks (s):  {self.cold_s:.2f}",
            *(f"PROBLEM {problem}" for problem in self.problems),
        ]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "none measured"
    ordered = sorted(values)
    return f"median {statistics.median(ordered):.2f}, most {ordered[-1]:.2f}; all " + " ".join(
        f"{value:.2f}" for value in ordered
    )


def bodies(count: int, most_tokens: int, rng: random.Random) -> list[dict[str, Any]]:
    """Requests of all kinds, each the same whenever it is sent."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.8, "seed": 5, "n": 2, "top_p": 0.9},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.0, "seed": 8, "presence_penalty": 0.5, "logprobs": 0, "min_tokens": 8},
    ]
    out = []
    for index in range(count):
        words = " ".join(rng.choice(_TOPICS) for _ in range(rng.choice((3, 20, 120))))
        out.append(
            {
                "model": "m",
                "prompt": f"Some notes on {words}, number {index}:",
                "max_tokens": rng.randint(most_tokens // 3, most_tokens),
                "stream": True,
                "stream_options": {"include_usage": True},
                **kinds[index % len(kinds)],
            }
        )
    return out


class Load:
    """Streams under way. ``tokens`` counts what has come; ``last`` is when."""

    def __init__(self, url: str, asks: Sequence[dict[str, Any]]) -> None:
        self._url = url
        self._asks = asks
        self.tokens = 0
        self.arrivals: list[float] = []
        self.results: list[Stream] = []

    def run(self) -> list[Stream]:
        """All of them at once, to their ends."""
        self.results = asyncio.run(self._all())
        return self.results

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
                    if line.startswith("data: {"):
                        self.tokens += 1
                        self.arrivals.append(time.monotonic())
                        stream.add(json.loads(line[6:]))
        except httpx.HTTPError as error:
            stream.problem = repr(error)
        return stream


class Watch:
    """Notes when ``/ready`` changes, looking every 20 ms."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/ready"
        self._end = threading.Event()
        self.changes: list[tuple[float, bool]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        was = True
        while not self._end.wait(0.02):
            is_ready = status_of(self._url) == 200
            if is_ready != was:
                self.changes.append((time.monotonic(), is_ready))
                was = is_ready

    def first_unready(self, after: float) -> float | None:
        return next((at for at, is_ready in list(self.changes) if not is_ready and at >= after), None)

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


def lose_one(server: Server, way: str, rng: random.Random) -> float:
    """Send a random rank the signal; when."""
    rank = rng.choice(wait_for_ranks(server))
    at = time.monotonic()
    rank.send_signal(_SIGNALS[way])
    return at


def wait_for_ranks(server: Server) -> list[psutil.Process]:
    wait_until(lambda: bool(server.ranks()), 60, "ranks run")
    return server.ranks()


def disturbed(
    server: Server, asks: Sequence[dict[str, Any]], way: str, moment: str, rng: random.Random, report: Report
) -> list[Stream]:
    """One round with a loss (two, in a recovery)."""
    load, watch = Load(server.url, asks), Watch(server.url)
    running = threading.Thread(target=load.run)
    try:
        if moment == "idle":
            lost_at = lose_one(server, way, rng)
            wait_until(lambda: watch.first_unready(lost_at) is not None, 30, "the loss is noticed")
            running.start()
        else:
            running.start()
            if moment == "prefill":
                time.sleep(rng.uniform(0, 0.5))
            else:
                least = rng.randint(1, 10 * len(asks))
                wait_until(lambda: load.tokens >= least or not running.is_alive(), 120, "tokens come", 0.005)
            lost_at = lose_one(server, way, rng)
        if moment == "recovery":
            wait_until(lambda: watch.first_unready(lost_at) is not None, 30, "the loss is noticed")
            time.sleep(rng.uniform(0, 3))
            lose_one(server, "kill", rng)
        running.join()
    finally:
        watch.stop()
    noticed_at = watch.first_unready(lost_at)
    if noticed_at is None:
        report.problems.append(f"a rank was lost ({moment}) and /ready did not say so")
        return load.results
    report.noticed_s.append(noticed_at - lost_at)
    after = [at for at in load.arrivals if at > noticed_at + 0.05]
    if after and moment != "recovery":
        report.recovered_s.append(after[0] - noticed_at)
    return load.results


def compare(expected: Sequence[Stream], got: Sequence[Stream], report: Report, what: str) -> None:
    """Count the streams that differ; what cannot be rounding is a problem."""
    report.num_streams += len(got)
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        if have.problem is not None or have.usage is None:
            report.problems.append(f"{what}, stream {index}: {have.problem or 'cut off'}")
        elif have != want:
            report.num_different += 1
            print(f"{what}, stream {index} differs:\n  {want}\n  {have}", file=sys.stderr)


def cold_start_s(log: Path) -> float:
    """Seconds from the first word of loading until the ranks served, by the server's own clock."""
    match = re.search(r"ready in ([\d.]+) s", log.read_text())
    assert match is not None, log.read_text()
    return float(match[1])


def num_restarts(server: Server) -> int:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    match = re.search(r"^shoal:engine_restarts_total\S* ([\d.]+)", text, re.MULTILINE)
    assert match is not None, text
    return int(float(match[1]))


def judge(report: Report, way: str, step_timeout_s: float) -> None:
    """Hold the figures against what is promised."""
    if report.num_different > MOST_DIFFERENT * report.num_streams:
        report.problems.append(f"{report.num_different} of {report.num_streams} streams differ")
    most_s = KILL_NOTICED_S if way == "kill" else step_timeout_s + 0.5
    late = [s for s in report.noticed_s if s > most_s]
    if late:
        report.problems.append(f"noticed too late: {late}")
    slow = [s for s in report.recovered_s if s > report.cold_s + SLOWER_THAN_COLD_S]
    if slow:
        report.problems.append(
            f"recovered slower than {report.cold_s:.1f} + {SLOWER_THAN_COLD_S:g} s: {slow}"
        )


def run(
    model: str,
    tp: int,
    way: str,
    moments: Sequence[str],
    *,
    seed: int,
    streams: int = 24,
    most_tokens: int = 120,
    step_timeout_s: float = 3.0,
    options: Sequence[str] = (),
) -> Report:
    """One server, one undisturbed round, and one round a moment."""
    rng, report = random.Random(seed), Report(seed)
    asks = bodies(streams, most_tokens, rng)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        arguments = [model, "-tp", str(tp), "--executor", "processes", "--served-model-name", "m"]
        arguments += ["--step-timeout", str(step_timeout_s), "--max-restarts", "1000"]
        arguments += ["--max-num-batched-tokens", "256"]  # steps well below the timeout
        faults = _faults(way, len(moments), tp, streams, most_tokens, rng)
        server = Server(*arguments, *options, log=log, env=environment(SHOAL_FAULT=faults))
        try:
            report.cold_s = cold_start_s(log)
            expected = Load(server.url, asks).run()
            compare(expected, expected, report, "undisturbed")
            for number, moment in enumerate(moments):
                if way in _SIGNALS:
                    got = disturbed(server, asks, way, moment, rng, report)
                else:
                    got = Load(server.url, asks).run()
                compare(expected, got, report, f"round {number} ({moment})")
            report.num_restarts = num_restarts(server)
            if report.num_restarts < len(moments):
                report.problems.append(f"{report.num_restarts} restarts for {len(moments)} losses")
        finally:
            status = server.stop()
            print(
                re.sub(r"(?m)^(?!.*(restart|starting the ranks)).*\n", "", log.read_text()), file=sys.stderr
            )
        if status != 0:
            report.problems.append(f"the server exited with status {status}")
    judge(report, way, step_timeout_s)
    return report


def _faults(way: str, count: int, tp: int, streams: int, most_tokens: int, rng: random.Random) -> str:
    """One fault a round, in a step of some round after the first (which takes some ``most_tokens`` steps)."""
    if way in _SIGNALS:
        return ""
    steps, step = [], most_tokens + 10
    for _ in range(count):
        step += rng.randint(5, most_tokens // 2)
        steps.append(f"{way}@{rng.randrange(tp)}:{step}")
    return ",".join(steps)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-tp", type=int, default=2)
    parser.add_argument("--way", choices=("kill", "stop", "raise", "hang"), default="kill")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--step-timeout", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    rng = random.Random(given.seed)
    moments = [rng.choice(MOMENTS) for _ in range(given.rounds)]
    report = run(
        given.model,
        given.tp,
        given.way,
        moments,
        seed=given.seed,
        streams=given.streams,
        step_timeout_s=given.step_timeout,
    )
    print("\n".join(report.lines()))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
