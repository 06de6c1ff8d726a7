"""What the engine itself costs a step: everything but the model, with ranks that answer at once.

    python benchmarks/engine_overhead.py [--model demo] [--steps 200] [--vocabulary 49152] [--json]

``engine`` is :meth:`EngineCore.step` less the time inside the fake executor: schedule, update, text and
deltas; with two steps in flight the ranks compute meanwhile. On the worker's side, ``batch`` is a step's
tensors laid out for attention, with the ids that its placeholders stand for, and ``sample`` greedy
sampling from ready logits, which are read once over the whole vocabulary, as any engine must. The rest is
what a step and its answer cost to encode and decode. Text is made by the tokenizer of ``--model``; with
``none`` there is no text. Times are medians in milliseconds, on one thread; ``engine_mean`` is a mean, to
show pauses. As in a server, what is loaded is kept from the garbage collector. Knows no model's weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable

import torch

from shoal.cache.manager import CacheManager
from shoal.checkpoint.progress import Report
from shoal.checkpoint.source import resolve
from shoal.comm.local import LocalComm
from shoal.engine.admission import Admission
from shoal.engine.core import EngineCore
from shoal.engine.protocol import EngineInfo
from shoal.engine.text import Tokenizer
from shoal.messages import (
    AllocateKV,
    RankReady,
    RankReport,
    SequenceStep,
    Step,
    StepResult,
    TokenResult,
    decode,
    encode,
    unpack_ids,
)
from shoal.model.base import Ragged
from shoal.process.heap import settle
from shoal.sampling.sampler import sample
from shoal.sampling_params import SamplingParams
from shoal.sched.scheduler import Scheduler
from shoal.worker.inputs import build_batch
from shoal.worker.placeholders import Placeholders

BLOCK_SIZE, MAX_MODEL_LEN = 16, 4096
PROMPT_TOKENS = range(40, 200)
CASES = ((32, 0), (256, 0), (256, 10_000))  # requests running, and queued behind them
IN_FLIGHT = (1, 2)  # steps
BUDGET_MS = 1.5
TEXT = (
    "The engine holds the truth about every request; ranks are replaceable. In 2026, 3 of 7 fish swam past "
    "the naïve café, and 日本語 text came by, too.\n\n    def step(self): return schedule, execute, update\n"
)


class InstantExecutor:
    """Ranks that know the answer before they are asked: some text, over and over."""

    computes_apart = True
    is_interruptible = True
    is_replaceable = False

    def __init__(self, answers: list[int]) -> None:
        self._answers = answers
        self._results: deque[tuple[Step, StepResult]] = deque()
        self.spent_s = 0.0
        self.last: tuple[Step, StepResult] | None = None

    def load(self, report: Report) -> list[RankReport]:
        return []

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        return []

    def reload(self) -> None:
        """They do not fail."""

    def interrupt(self) -> None:
        """They do not reload."""

    def submit(self, step: Step) -> None:
        started = time.perf_counter()
        answers, at = self._answers, step.step_id
        tokens = [
            TokenResult(sequence_id=s.sequence_id, token_id=answers[(at + 7 * s.sequence_id) % len(answers)])
            for s in step.sequences
            if s.sampling is not None
        ]
        self._results.append((step, StepResult(step_id=at, tokens=tuple(tokens))))
        self.spent_s += time.perf_counter() - started

    def collect(self) -> StepResult:
        self.last = self._results.popleft()
        return self.last[1]

    def check(self) -> None:
        """They are there."""

    def shutdown(self) -> None:
        """There is nothing to stop."""


def make_core(
    executor: InstantExecutor, tokenizer: Tokenizer, num_seqs: int, steps_in_flight: int
) -> EngineCore:
    """A core with room for ``num_seqs`` sequences of any length."""
    blocks = num_seqs * MAX_MODEL_LEN // BLOCK_SIZE
    info = EngineInfo(
        model="none",
        architecture="none",
        max_model_len=MAX_MODEL_LEN,
        tensor_parallel_size=1,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        attention="none",
        dtype="float32",
        device="cpu",
    )
    scheduler = Scheduler(
        CacheManager(blocks, BLOCK_SIZE),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
    )
    admission = Admission(tokenizer.vocab_size, frozenset(), {}, seed=0, replica_index=0)
    return EngineCore(executor, scheduler, tokenizer, admission, info, steps_in_flight)


def run_engine(
    tokenizer: Tokenizer, running: int, queued: int, in_flight: int, steps: int
) -> tuple[list[float], Step, StepResult]:
    """Seconds of each step beside the executor, with all ``running`` decoding; and the last step."""
    answers = tokenizer.encode(TEXT) if tokenizer.is_present else list(range(100, 200))
    executor = InstantExecutor(answers)
    core = make_core(executor, tokenizer, running, in_flight)
    draw = random.Random(0)
    params = SamplingParams(max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS.stop, ignore_eos=True, temperature=0.0)
    for index in range(running + queued):
        length = PROMPT_TOKENS[index % len(PROMPT_TOKENS)]
        core.submit(str(index), [draw.randrange(tokenizer.vocab_size) for _ in range(length)], params)
    while executor.last is None or len(executor.last[1].tokens) < running:
        core.step()
    times = []
    for _ in range(steps):
        started, before = time.perf_counter(), executor.spent_s
        core.step()
        times.append(time.perf_counter() - started - (executor.spent_s - before))
    return times, *executor.last


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """The middle of ``repeats`` times, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def measure(
    tokenizer: Tokenizer, running: int, queued: int, in_flight: int, steps: int, vocabulary: int
) -> dict[str, float]:
    """One row of the table."""
    times, step, result = run_engine(tokenizer, running, queued, in_flight, steps)
    device = torch.device("cpu")
    placeholders = Placeholders(LocalComm(), 0, device)
    placeholders.keep(result.tokens)

    def batch_of_step() -> tuple[Ragged, list[SequenceStep]]:
        return build_batch(step, BLOCK_SIZE, device, placeholders.ids(step))

    with torch.inference_mode():
        batch, sampled = batch_of_step()
        assert len(unpack_ids(step.sequences[0].token_ids)) == 1 and batch.attention is not None
        logits = torch.randn(running, vocabulary, generator=torch.Generator().manual_seed(0))
        batch_ms = median_ms(batch_of_step, steps)
        sample_ms = median_ms(lambda: sample(logits, sampled), min(steps, 50))
    step_bytes, result_bytes = encode(step), encode(result)
    return {
        "running": running,
        "queued": queued,
        "in_flight": in_flight,
        "engine_ms": 1e3 * statistics.median(times),
        "engine_mean_ms": 1e3 * statistics.fmean(times),
        "batch_ms": batch_ms,
        "sample_ms": sample_ms,
        "encode_step_ms": median_ms(lambda: encode(step), steps),
        "decode_step_ms": median_ms(lambda: decode(step_bytes), steps),
        "encode_result_ms": median_ms(lambda: encode(result), steps),
        "decode_result_ms": median_ms(lambda: decode(result_bytes), steps),
        "step_bytes": len(step_bytes),
    }


def print_table(rows: list[dict[str, float]]) -> None:
    names = [name for name in rows[0] if name.endswith("_ms")]
    counts = ("running", "queued", "in_flight")
    head = "".join(f"{name:>10}" for name in counts) + "".join(f"{name[:-3]:>15}" for name in names)
    print(f"{head}   (ms a step)")
    for row in rows:
        line = "".join(f"{row[name]:>10}" for name in counts)
        print(line + "".join(f"{row[name]:>15.3f}" for name in names))
    worst = max(row["engine_ms"] for row in rows)
    verdict = "within" if worst < BUDGET_MS else "over"
    print(f"engine: at most {worst:.2f} ms a step, {verdict} the budget of {BUDGET_MS} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description="What the engine costs a step, beside the model.")
    parser.add_argument("--model", default="demo", help="whose tokenizer makes the text; none: no text")
    parser.add_argument("--steps", type=int, default=200, help="steps measured for each row")
    parser.add_argument("--vocabulary", type=int, default=49152, help="width of the logits")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model == "none":
        tokenizer = Tokenizer(None, vocab_size=options.vocabulary)
    else:
        tokenizer = Tokenizer.load(resolve(options.model), vocab_size=options.vocabulary)
    settle()
    rows = [
        measure(tokenizer, running, queued, in_flight, options.steps, options.vocabulary)
        for running, queued in CASES
        for in_flight in IN_FLIGHT
    ]
    if options.json:
        print(json.dumps({"budget_ms": BUDGET_MS, "rows": rows}))
    else:
        print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
