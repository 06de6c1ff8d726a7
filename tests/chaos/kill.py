"""Ranks that die, stop, raise or hang under load: every stream ends as if nothing had happened.

    PYTHONPATH=tests python -m chaos.kill [demo|tiny|MODEL] [-tp N] [--way WAY] [--rounds 20] [--seed N]

In each round streams of different lengths and kinds (greedy, sampled, with penalties, ``n=2``, with
log-probabilities) run against ``shoal serve``, and a random rank is lost at a random moment: while nothing
runs, in the middle of prompts, of decoding, or of the start of ranks that were lost before. Texts, tokens,
finish reasons, log-probabilities and usage must be those of an undisturbed round. Which moment it really was
is read from the engine's own words at the loss; every moment that was aimed at must have been hit.

Printed and judged are, by the clock of the server's log: how long it took to notice, from the damage to the
supervisor's event; from then to the first new token; and beside that a cold start of the group: from the
spawn of its ranks until they serve, plus the time to the first token of the same streams, sent at once.
Several servers share the rounds: cold starts are measured among the losses. Status 1 if any line fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from chaos.kill_log import Event, EventLog
from chaos.kill_report import MOMENTS, Report
from chaos.streams import Load, Stream, bodies, differences
from support import families
from support.programs import Server, environment, status_of, wait_until

__all__ = ["WAYS", "moments_of", "run"]

WAYS = ("kill", "stop", "raise", "hang")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1, "hang": signal.SIGUSR1}
_STARTED_S = 900  # for a group to be started, on a busy machine that has to compile first
_QUIET_S = 0.5  # an idle engine that logs at level debug looks at its books five times a second
_AT_REST = re.compile(
    r"^shoal:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc)\S* (\S+)", re.M
)


class Scene:
    """One server and what has to be known of an undisturbed round: when to strike.

    Args:
        asks: the streams of every round.
        rng: decides which rank, and when.
    """

    def __init__(
        self, server: Server, asks: Sequence[dict[str, Any]], way: str, report: Report, rng: random.Random
    ) -> None:
        self._server = server
        self._log = EventLog(server.log)
        self._asks = asks
        self._way = way
        self._report = report
        self._rng = rng
        self._start_s = 0.0  # from the spawn of ranks until they serve
        self._prompts_s = 0.0  # until the last stream's first token
        self._num_events = 0

    def undisturbed(self) -> list[Stream]:
        """A round without a loss; with it, the sample of a cold start."""
        load = Load(self._server.url, self._asks)
        load.run()
        spawned, ready = self._log.first("spawned"), self._log.first("ready")
        assert spawned is not None and ready is not None and load.arrivals, self._server.log.read_text()
        self._report.cold_s.append(ready.at - spawned.at + load.arrivals[0] - load.started_at)
        self._start_s = ready.at - spawned.at
        self._prompts_s = load.arrivals[min(len(self._asks), len(load.arrivals) - 1)] - load.started_at
        self._num_events = len(load.arrivals)
        return load.results

    def disturbed(self, moment: str) -> list[Stream]:
        """A round with a loss at ``moment``; two, in a recovery."""
        load, began_at = Load(self._server.url, self._asks), time.time()
        running = threading.Thread(target=load.run)
        if moment != "idle":
            running.start()
            self._wait_for(moment, load, running)
        self._lose_one(_SIGNALS[self._way])
        if moment == "idle":
            self._wait_for_event("lost", began_at)
            running.start()
        if moment == "recovery":
            self._wait_for_event("spawned", self._wait_for_event("lost", began_at).at)
            time.sleep(self._rng.uniform(0, 0.7 * self._start_s))
            self._lose_one(signal.SIGKILL)
        running.join()
        self._wait_for_rest(began_at)
        self._measure(load, began_at)
        return load.results

    def _wait_for(self, moment: str, load: Load, running: threading.Thread) -> None:
        """Until it is time to strike."""
        if moment == "prefill":
            time.sleep(self._rng.uniform(0.05, 0.8) * self._prompts_s)
            return
        least = self._rng.randint(len(self._asks), max(len(self._asks), int(0.6 * self._num_events)))
        wait_until(
            lambda: load.num_arrived >= least or not running.is_alive(), _STARTED_S, "tokens come", 0.002
        )

    def _wait_for_event(self, kind: str, after: float) -> Event:
        """The first of its kind since a moment."""
        wait_until(lambda: self._log.first(kind, after) is not None, _STARTED_S, f"ranks are {kind}", 0.01)
        return self._log.events(kind, after)[0]

    def _lose_one(self, damage: signal.Signals) -> None:
        """Send a random rank the signal."""
        struck_at = time.time()
        try:
            os.kill(self._rng.choice(self._log.events("spawned")[-1].pids), damage)
        except ProcessLookupError:  # its group was ended for another reason meanwhile
            self._report.notes.append(f"the rank that was to get {damage.name} had just ended")
            return
        if damage in (signal.SIGKILL, signal.SIGSTOP):
            self._report.damages.append(struck_at)

    def _wait_for_rest(self, began_at: float) -> None:
        """Until ranks serve again, nothing is left, and the engine has looked at its own books meanwhile."""
        server = self._server

        def is_at_rest() -> bool:
            assert server.process.poll() is None, server.log.read_text()[-4000:]
            num_lost, num_served = (len(self._log.events(kind, began_at)) for kind in ("lost", "served"))
            values = _AT_REST.findall(httpx.get(f"{server.url}/metrics", timeout=30).text)
            assert len(values) >= 3, "the metrics have other names"
            return 0 < num_lost <= num_served and all(float(value) == 0 for value in values)

        wait_until(is_at_rest, _STARTED_S, "all blocks are free and ranks serve", 0.05)
        until = time.monotonic() + _QUIET_S
        while time.monotonic() < until:
            if status_of(f"{server.url}/health") != 200:
                self._report.problems.append(
                    "after a round the engine found its books wrong, or ended otherwise"
                )
                return

    def _measure(self, load: Load, began_at: float) -> None:
        """Take the round's figures down, from what the server's log says of it."""
        report, events = self._report, self._log.events(after=began_at)
        report.num_restarts += sum(event.kind == "served" for event in events)
        noticed = [event for event in events if event.kind in ("lost", "failed")]
        for event in noticed:
            for moment in _hit(event):
                report.hits[moment] = report.hits.get(moment, 0) + 1
        damages = [event.at for event in events if event.kind == "fault"]
        damages += [at for at in report.damages if at >= began_at]
        found = [next((event for event in noticed if event.at > at), None) for at in sorted(damages)]
        for at, event in zip(sorted(damages), found, strict=True):
            if event is None:
                report.problems.append("a rank was lost and the supervisor did not say so")
            else:
                fast = self._way in ("kill", "raise") or event.kind == "failed"
                (report.noticed_s if fast else report.timed_out_s).append(event.at - at)
        report.num_unasked += len([event for event in noticed if event not in found])
        served = self._wait_for_event("served", noticed[-1].at)
        spawned = self._log.events("spawned", noticed[-1].at)[-1]
        self._start_s = min(
            self._start_s, served.at - spawned.at
        )  # the first start may have compiled kernels
        token_at = load.first_after(served.at)
        if token_at is not None:
            report.recovered_s.append(token_at - noticed[-1].at)


def _hit(event: Event) -> list[str]:
    """The moments that a loss met."""
    if event.kind == "failed":
        return ["recovery"]
    met = [("prefill", event.num_in_prompt), ("decode", event.num_beyond)]
    return [moment for moment, count in met if count] or ["idle"]


def moments_of(rounds: int, rng: random.Random) -> list[str]:
    """All kinds of moments about equally often, in random order."""
    moments = [MOMENTS[number % len(MOMENTS)] for number in range(rounds)]
    rng.shuffle(moments)
    return moments


def model_of(name: str, folder: Path, options: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of :func:`run` for a model by its name on the command line; options are the server's."""
    arguments = tiny(folder) if name == "tiny" else {"model": name, "options": ()}
    return {**arguments, "options": (*arguments["options"], *options)}


def tiny(folder: Path) -> dict[str, Any]:
    """A model that starts in a moment, for :func:`run`: its prompts are words that it knows, and its steps
    are small, so that there are many.
    """
    return {
        "model": str(families.save_with_words("llama_9_3", folder)),
        "words": [f"w{number}" for number in range(4, families.VOCABULARY)],
        "options": ("--max-num-batched-tokens", "16", "--kv-cache-memory-bytes", "16000000"),
    }


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
    servers: int = 1,
    options: Sequence[str] = (),
    words: Sequence[str] | None = None,
) -> Report:
    """Servers one after the other: on each an undisturbed round, then its share of the rounds with losses."""
    rng, report = random.Random(seed), Report(seed, way, tp, step_timeout_s, list(moments))
    asks = bodies(streams, most_tokens, rng, *([words] if words else []))
    expected: list[Stream] = []
    faults = ",".join(f"{way}@{rank}:signal" for rank in range(tp)) if way in ("raise", "hang") else ""
    arguments = [model, "-tp", str(tp), "--executor", "processes", "--served-model-name", "m"]
    arguments += ["--step-timeout", str(step_timeout_s), "--max-restarts", "1000"]
    arguments += ["--max-num-batched-tokens", "256"]  # steps well below the timeout
    arguments += ["--log-format", "json", "--log-level", "debug", *options]
    for number in range(servers):
        with tempfile.TemporaryDirectory() as folder:
            log, variables = Path(folder) / "log", environment(SHOAL_FAULT=faults)
            server = Server(*arguments, log=log, timeout_s=_STARTED_S, env=variables)
            try:
                scene = Scene(server, asks, way, report, rng)
                undisturbed = scene.undisturbed()
                expected = expected or undisturbed
                _compare(asks, expected, undisturbed, report, f"undisturbed on server {number}")
                for index, moment in list(enumerate(moments))[number::servers]:
                    _compare(asks, expected, scene.disturbed(moment), report, f"round {index} ({moment})")
            finally:
                status = server.stop()
            if status != 0:
                report.problems.append(f"the server exited with status {status}")
            report.problems += EventLog(server.log).problems()
    return report


def _compare(
    asks: Sequence[dict[str, Any]],
    expected: Sequence[Stream],
    got: Sequence[Stream],
    report: Report,
    what: str,
) -> None:
    defects, differing = differences(asks, expected, got)
    report.num_streams += len(got)
    report.num_different += len(differing)
    report.problems += [f"{what}, {words}" for words in defects]
    for words in differing:
        print(f"{what}, {words}", file=sys.stderr)


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-tp", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, default="kill")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--most-tokens", type=int, default=120)
    parser.add_argument("--servers", type=int, default=4, help="how many share the rounds")
    parser.add_argument("--step-timeout", type=float, default=3.0)
    parser.add_argument(
        "--option", action="append", default=[], help="for shoal serve, as in --option=--standby-ranks"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = run(
            **model_of(given.model, Path(folder), given.option),
            tp=given.tp,
            way=given.way,
            moments=moments_of(given.rounds, random.Random(given.seed)),
            seed=given.seed,
            streams=given.streams,
            most_tokens=given.most_tokens,
            step_timeout_s=given.step_timeout,
            servers=min(given.servers, given.rounds),
        )
    print(json.dumps(report.to_dict()) if given.json else "\n".join(report.lines()))
    return 1 if report.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
