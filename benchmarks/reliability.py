"""What becomes of running requests when their engine's compute fails: shoal beside transformers' continuous
batching, on the same prompts.

    python benchmarks/reliability.py [--requests 8] [--tokens 40] [--runs 1] [--json]

Each case runs in a process of its own, which prints a line for every request that ended. Three losses:

- ``raise``: one forward pass raises, once, in the middle.
- ``hang``: one forward pass never returns. shoal's step timeout is 10 s; transformers has none, and its
  requests are waited for 30 s.
- ``kill``: the process that computes gets SIGKILL in the middle. shoal's is a rank; transformers' manager is
  a thread of the process that holds the requests, so that is the one.

Then one more request is made, where there is still somebody to ask.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from typing import Any

_LIMIT_S = 600
_STEP = 20  # the forward pass that raises
_STEP_TIMEOUT_S = 10
_PATIENCE_S = 30  # without a request that ends, for transformers; half of it for the one made afterwards
_CACHE_SHARE = 0.05  # of the memory, for transformers' KV pages


@dataclass
class Outcome:
    """What one case came to."""

    engine: str
    loss: str
    complete: int = 0  # requests with all their tokens
    failed: int = 0  # requests told that they failed
    unanswered: int = 0
    later: str = "nobody left to ask"  # what a request made afterwards gets
    seconds: float = 0.0  # all of it, from the start of the process


def prompts(count: int) -> list[list[int]]:
    """Token ids that any vocabulary has."""
    return [[(7 * i + 3 * j) % 900 + 50 for j in range(5 + 3 * (i % 9))] for i in range(count)]


def tell(**words: Any) -> None:
    """One line for the parent."""
    print(json.dumps(words), flush=True)


def run_shoal(loss: str, count: int, tokens: int) -> None:
    """The requests through ``shoal.LLM``, its one rank in a process."""
    import psutil

    from shoal import LLM, SamplingParams

    if loss in ("raise", "hang"):
        os.environ["SHOAL_FAULT"] = f"{loss}@0:{_STEP}"
    greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    few = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    options = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28, "step_timeout": _STEP_TIMEOUT_S}
    with LLM("demo", executor="processes", **options) as llm:
        tell(loaded=True)

        def kill(num_finished: int) -> None:
            if num_finished == 1 and loss == "kill":
                rank = next(c for c in psutil.Process().children() if "shoal.worker" in " ".join(c.cmdline()))
                rank.send_signal(signal.SIGKILL)

        # The first ends early, so that the loss comes while the others run.
        params = [few, *[greedy] * (count - 1)]
        for output in llm.generate(prompts(count), params, kill):
            tell(ended=output.outputs[0].finish_reason)
        tell(later=llm.generate([[60, 61]], few)[0].outputs[0].finish_reason)


def run_transformers(loss: str, count: int, tokens: int) -> None:
    """The requests through transformers' continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from shoal.checkpoint.source import resolve

    model = AutoModelForCausalLM.from_pretrained(resolve("demo"), dtype=torch.float32)
    num_passes = 0

    def count_passes(*_: Any) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == _STEP:
            if loss == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if loss == "hang":
                threading.Event().wait()
            raise RuntimeError("asked for")

    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_memory_percent=_CACHE_SHARE)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    model.register_forward_pre_hook(count_passes)
    manager.start()
    tell(loaded=True)
    for index, ids in enumerate(prompts(count)):
        manager.add_request(ids, request_id=str(index), max_new_tokens=4 if index == 0 else tokens)
    for _ in range(count):
        result = manager.get_result(timeout=_PATIENCE_S)
        if result is None:
            break
        tell(ended="error" if result.error else "length")
    try:
        manager.add_request([60, 61], request_id="later", max_new_tokens=4)
        result = manager.get_result(request_id="later", timeout=_PATIENCE_S / 2)
        no_answer = f"no answer within {_PATIENCE_S / 2:g} s"
        tell(later=no_answer if result is None else result.error or "length")
    except Exception as error:  # whatever a caller would get
        tell(later=f"{type(error).__name__}: {error}")
    manager.stop(block=False)
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs would be waited for


def case(engine: str, loss: str, count: int, tokens: int) -> Outcome:
    """One engine and one loss, in a process of its own."""
    command = [sys.executable, __file__, "--case", engine, loss, "--requests", str(count)]
    command += ["--tokens", str(tokens)]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=False)
    outcome = Outcome(engine, loss, seconds=round(time.monotonic() - started, 1))
    for line in done.stdout.splitlines():
        words = json.loads(line)
        if "ended" in words:
            outcome.complete += words["ended"] == "length"
            outcome.failed += words["ended"] != "length"
        outcome.later = str(words.get("later", outcome.later))[:100]
    outcome.unanswered = count - outcome.complete - outcome.failed
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", nargs=2, metavar=("ENGINE", "LOSS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        engine, loss = given.case
        (run_shoal if engine == "shoal" else run_transformers)(loss, given.requests, given.tokens)
        return
    outcomes = [
        case(engine, loss, given.requests, given.tokens)
        for _ in range(given.runs)
        for loss in ("raise", "hang", "kill")
        for engine in ("shoal", "transformers")
    ]
    if given.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
        return
    print(f"{date.today()}, transformers {version('transformers')}, {given.requests} requests")
    print(f"{'loss':6} {'engine':13} complete failed unanswered seconds  afterwards")
    for o in outcomes:
        counts = f"{o.complete:8} {o.failed:6} {o.unanswered:10} {o.seconds:7.1f}"
        print(f"{o.loss:6} {o.engine:13} {counts}  {o.later}")


if __name__ == "__main__":
    main()
