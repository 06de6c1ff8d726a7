"""Ranks that die, stop, raise or hang under load: every stream ends as if nothing had happened.

    PYTHONPATH=tests python -m chaos.kill [demo|tiny|MODEL] [-tp N] [--way WAY] [--rounds 20] [--seed N]

Streams of different lengths and kinds (greedy, sampled, with penalties, ``n=2``, with log-probabilities) run
against ``shoal serve``, 24 at a time, one after the other. In each round a random rank is lost at a random
moment: while nothing runs, in the middle of prompts, of decoding, or of the start of ranks that were lost
before; the next comes once every stream has gone on. Ids, texts, finish reasons, log-probabilities and usage
must be those of the same requests undisturbed; where ids differ, rounding must explain it
(:mod:`chaos.kill_ties`). Which moment it really was is read from the engine's own words at the loss; each
must have been hit; how often is printed beside how often it was aimed at.

Printed and judged are, by the clock of the server's log: how long it took to notice, from the damage to the
supervisor's event; from then to the first new token; and beside that a cold start of the group: from the
spawn of its ranks until they serve, plus the time to the first token of the same streams, sent at once.
The undisturbed streams have a server of their own, and others share the rounds: cold starts are measured
among the losses. Status 1 if any line fails.
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
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from chaos.kill_log import Event, EventLog
from chaos.kill_report import Report
from chaos.kill_ties import Judge
from chaos.streams import Asks, Stream, Traffic, asks_of
from support import families
from support.programs import Server, environment, status_of, wait_until

__all__ = ["WAYS", "judge", "moments_of", "run"]

WAYS = ("kill", "stop", "raise", "hang")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1, "hang": signal.SIGUSR1}
_AIMS = ("prefill", "decode", "recovery", "idle")
_STARTED_S = 900  # for a group to be started, on a busy machine that has to compile first
_QUIET_S = 0.5  # an idle engine that logs at level debug looks at its books five times a second
_MOST_EVENTS = 5  # a stream, between every stream's going on and a loss in the middle of decoding
_MOST_STEPS = 5  # with long prompts, before a loss in the middle of them
_METRIC = re.compile(r"^shoal:(\w+)(?:\{[^}]*\})? (\S+)$", re.M)
_AT_REST = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Scene:
    """One server with its traffic: when to strike, and what came of it.

    Args:
        ended: told of every stream that ends, with its ask's index.
        rng: decides which rank, and when.
    """

    def __init__(
        self,
        server: Server,
        asks: Asks,
        way: str,
        report: Report,
        rng: random.Random,
        ended: Callable[[int, Stream], None],
    ) -> None:
        self._server = server
        self._log = EventLog(server.log)
        self._asks = asks
        self._way = way
        self._report = report
        self._rng = rng
        self._traffic = Traffic(server.url, asks, ended)
        self._num_bursts = 0
        self._start_s = 0.0  # from the spawn of ranks until they serve

    def begin(self) -> None:
        """Let the streams flow; with it, the sample of a cold start."""
        started_at = self._traffic.flow()
        wait_until(lambda: bool(self._traffic.arrivals), _STARTED_S, "the first token comes", 0.005)
        spawned, ready = self._log.first("spawned"), self._log.first("ready")
        assert spawned is not None and ready is not None, self._server.log.read_text()
        self._start_s = ready.at - spawned.at
        self._report.cold_s.append(self._start_s + self._traffic.arrivals[0] - started_at)

    def finish(self) -> None:
        """Let all asks come to their ends undisturbed."""
        self._traffic.drain()
        self._wait(lambda: not self._traffic.num_open(), "streams end")
        self._traffic.send(range(self._asks.num_flowing, len(self._asks.bodies)))
        self._wait(lambda: not self._traffic.num_open(), "long prompts end")

    def rounds(self, moments: Iterable[tuple[int, str]]) -> None:
        """One after the other, numbered."""
        for number, moment in moments:
            print(f"{time.strftime('%X')} round {number}: {moment}", file=sys.stderr, flush=True)
            self.disturbed(moment)

    def disturbed(self, moment: str) -> None:
        """A round with a loss at ``moment``; two, in a recovery."""
        if moment == "idle":
            self.rest()
        elif moment == "decode":
            self._wait_in_decode()
        else:
            self._wait_in_prompts()
        began_at = time.time()
        self._lose_one(_SIGNALS[self._way])
        lost = self._event("lost", began_at)
        if moment == "recovery":
            self._event("spawned", lost.at)
            time.sleep(self._rng.uniform(0, 0.7 * self._start_s))
            self._lose_one(signal.SIGSTOP if self._way == "stop" else signal.SIGKILL)
        self._traffic.flow()
        self._wait(lambda: self._serves_since(began_at), "ranks serve again")
        served = self._log.events("served", began_at)[-1]
        self._wait(lambda: self._has_gone_on(served.at), "every stream goes on")
        self._measure(began_at)

    def rest(self) -> None:
        """Until nothing is left, and the engine has looked at its own books meanwhile."""
        self._traffic.drain()
        self._wait(lambda: not self._traffic.num_open(), "streams end")
        self._wait(lambda: not any(self._metrics()[name] for name in _AT_REST), "all blocks are free")
        until = time.monotonic() + _QUIET_S
        while time.monotonic() < until:
            if status_of(f"{self._server.url}/health") != 200:
                self._report.problems.append("the engine found its books wrong, or ended otherwise")
                return

    def close(self) -> None:
        """End the traffic."""
        self._traffic.close()

    def _wait_in_decode(self) -> None:
        """Until the streams have gone on for a while, and none is in its prompt."""
        traffic = self._traffic
        least = len(traffic.arrivals) + self._rng.randint(1, _MOST_EVENTS * self._asks.num_flowing)
        self._wait(lambda: len(traffic.arrivals) >= least and not traffic.num_fresh(), "tokens come", 0.002)

    def _wait_in_prompts(self) -> None:
        """Until long prompts are being computed, for a while. They are let in in turn as far as a step has
        room: while one waits, each step that is begun has a part of one before it. Two may be older.
        """
        burst, least = self._asks.burst(self._num_bursts), self._rng.randint(2, _MOST_STEPS)
        self._num_bursts += 1
        self._traffic.send(burst)
        waited_at: float | None = None

        def is_time() -> bool:
            nonlocal waited_at
            values = self._metrics()
            num_waiting, num_steps = values["num_requests_waiting"], values["engine_steps_total"]
            if waited_at is None and num_waiting:
                waited_at = num_steps
            if waited_at is None:
                return not self._traffic.num_open(burst)  # they are over, and this moment is missed
            return num_steps >= waited_at + (least if num_waiting > 1 else 2)

        self._wait(is_time, "long prompts are computed", 0.002)

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

    def _serves_since(self, began_at: float) -> bool:
        num_lost, num_served = (len(self._log.events(kind, began_at)) for kind in ("lost", "served"))
        return 0 < num_lost <= num_served

    def _has_gone_on(self, served_at: float) -> bool:
        """Whether every stream that was there has a token, and the long ones are out of the next burst's
        way.
        """
        is_over = not any(self._traffic.num_open(self._asks.burst(number)) for number in range(2))
        return is_over and not self._traffic.num_silent_since(served_at)

    def _event(self, kind: str, after: float) -> Event:
        """The first of its kind since a moment."""
        self._wait(lambda: self._log.first(kind, after) is not None, f"ranks are {kind}", 0.01)
        return self._log.events(kind, after)[0]

    def _wait(self, condition: Callable[[], bool], what: str, poll_s: float = 0.05) -> None:
        def is_so() -> bool:
            assert self._server.process.poll() is None, self._server.log.read_text()[-4000:]
            return condition()

        wait_until(is_so, _STARTED_S, what, poll_s)

    def _metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self._server.url}/metrics", timeout=30).text
        return {name: float(value) for name, value in _METRIC.findall(text)}

    def _measure(self, began_at: float) -> None:
        """Take the round's figures down, from what the server's log says of it."""
        report, events = self._report, self._log.events(after=began_at)
        report.num_restarts += sum(event.kind == "served" for event in events)
        report.num_replayed += sum(event.num_replayed for event in events)
        noticed = [event for event in events if event.kind in ("lost", "failed")]
        for event in noticed:
            moment = _moment(event)
            report.hits[moment] = report.hits.get(moment, 0) + 1
        damages = [event.at for event in events if event.kind == "fault"]
        damages += [at for at in report.damages if at >= began_at]
        found = [next((event for event in noticed if event.at > at), None) for at in sorted(damages)]
        for at, event in zip(sorted(damages), found, strict=True):
            if event is None:
                report.problems.append("a rank was lost and the supervisor did not say so")
            else:
                fast = self._way in ("kill", "raise") or (event.kind == "failed" and self._way != "stop")
                (report.noticed_s if fast else report.timed_out_s).append(event.at - at)
        report.num_unasked += len([event for event in noticed if event not in found])
        served = self._log.events("served", noticed[-1].at)[-1]
        spawned = [event for event in self._log.events("spawned") if event.at < served.at][-1]
        # The first start may have compiled kernels.
        self._start_s = min(self._start_s, served.at - spawned.at)
        token_at = self._traffic.first_after(served.at)
        assert token_at is not None, "every stream has gone on"
        report.recovered_s.append(token_at - noticed[-1].at)


def _moment(event: Event) -> str:
    """What a loss met."""
    if event.kind == "failed":
        return "recovery"
    return "prefill" if event.num_in_prompt else "decode" if event.num_beyond else "idle"


def moments_of(rounds: int, rng: random.Random) -> list[str]:
    """All kinds of moments about equally often, in random order."""
    moments = [_AIMS[number % len(_AIMS)] for number in range(rounds)]
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
        "long_words": 150,
        "options": ("--max-num-batched-tokens", "48", "--kv-cache-memory-bytes", "16000000"),
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
    long_words: int = 240,
    expected: dict[int, Stream] | None = None,
) -> Report:
    """A server undisturbed, and then ``servers`` others, each with its share of the rounds. (The first one's
    prefix cache holds the long prompts, which are to be computed when ranks are lost.)

    Args:
        expected: what each ask brings undisturbed, of another way's run with this seed; filled in, if empty.
    """
    rng, report = random.Random(seed), Report(seed, way, tp, step_timeout_s, list(moments))
    asks = asks_of(streams, most_tokens, long_words, rng, *([words] if words else []))
    expected = {} if expected is None else expected
    ended: list[tuple[int, Stream]] = []
    faults = ",".join(f"{way}@{rank}:signal" for rank in range(tp)) if way in ("raise", "hang") else ""
    arguments = [model, "-tp", str(tp), "--executor", "processes", "--served-model-name", "m"]
    arguments += ["--step-timeout", str(step_timeout_s), "--max-restarts", "1000"]
    arguments += ["--max-num-batched-tokens", "256"]  # steps well below the timeout
    arguments += ["--log-format", "json", "--log-level", "debug", *options]
    for number in range(1 if expected else 0, 1 + servers):
        with tempfile.TemporaryDirectory() as folder:
            log, variables = Path(folder) / "log", environment(SHOAL_FAULT=faults)
            server = Server(*arguments, log=log, timeout_s=_STARTED_S, env=variables)
            scene = Scene(server, asks, way, report, rng, lambda index, stream: ended.append((index, stream)))
            try:
                scene.begin()
                if number == 0:
                    scene.finish()
                    expected.update(reversed(ended))  # of each ask the first
                else:
                    scene.rounds(list(enumerate(moments))[number - 1 :: servers])
                scene.rest()
            finally:
                scene.close()
                status = server.stop()
            if status != 0:
                report.problems.append(f"the server exited with status {status}")
            report.problems += EventLog(server.log).problems()
    judge(asks, expected, ended, report, lambda: Judge.of_model(model))
    return report


def judge(
    asks: Asks,
    expected: Mapping[int, Stream],
    ended: Sequence[tuple[int, Stream]],
    report: Report,
    make: Callable[[], Judge],
) -> None:
    """Hold the streams that ended against those of their asks undisturbed.

    Args:
        make: the judge of differences; called if there are any.
    """
    assert expected.keys() == set(range(len(asks.bodies))), "an ask did not end undisturbed"
    differing = []
    for number, (index, have) in enumerate(ended):
        report.num_streams += 1
        defect = have.defect(asks.bodies[index])
        if defect is not None:
            report.problems.append(f"stream {number} of ask {index}: {defect}")
        elif have != expected[index]:
            differing.append((number, index, have))
    report.num_different = len(differing)
    of_rounding = make() if differing else None
    for number, index, have in differing:
        assert of_rounding is not None
        found = of_rounding.unexplained(asks.bodies[index], expected[index], have)
        report.problems += [f"stream {number} of ask {index}, {words}" for words in found]


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
    parser.add_argument("--servers", type=int, default=2, help="how many share the rounds")
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
