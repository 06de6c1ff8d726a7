"""Output tokens per second on the 32-prompt workload, shoal at some rank counts beside transformers' own
continuous batching, with a coherence check: a run whose ids are wrong is no result, and exits 1.

    python benchmarks/continuous_batching.py --tp 1,2 --threads 2 --repeats 3 [--compare] [--json]

Every contender gets the same number of threads in all, is warmed up on two prompts, and the contenders take
turns; the figure is the median of the repeats. Knows no engine's inside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "data"
TOKENS = 64
Run = Callable[[list[list[int]]], list[list[int]]]


def workload(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and transformers' greedy ids for them."""
    prompts = json.loads((DATA / "workload-32.json").read_text())["prompts"][:count]
    expected = json.loads((DATA / "workload-32-reference.json").read_text())
    return [p["ids"] for p in prompts], [expected[str(p["i"])] for p in prompts]


def shoal_run(tp: int, threads: int) -> Run:
    import shoal

    llm = shoal.LLM(
        "demo", tensor_parallel_size=tp, num_threads=max(threads // tp, 1), kv_cache_memory_bytes=1 << 30
    )
    params = shoal.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate(prompts, params)
        return [output.outputs[0].token_ids for output in outputs]

    return run


def transformers_run(threads: int) -> Run:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from shoal.checkpoint.source import resolve

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        resolve("demo"), dtype=torch.float32, attn_implementation="sdpa"
    )
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        in_order = sorted(outputs.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        return [output.generated_tokens for output in in_order]

    return run


def measure(runs: dict[str, Run], prompts: list[list[int]], expected: list[list[int]], repeats: int) -> Any:
    """Median tokens per second and the number of requests whose ids differ, by contender."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    differing: dict[str, int] = {}
    for run in runs.values():
        run(prompts[:2])
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            got = run(prompts)
            seconds[name].append(time.perf_counter() - started)
            differing[name] = sum(a != b for a, b in zip(got, expected, strict=True))
    total = TOKENS * len(prompts)
    return [
        {
            "name": name,
            "tokens_per_s": total / statistics.median(taken),
            "seconds": taken,
            "differing": differing[name],
        }
        for name, taken in seconds.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", default="1,2", help="rank counts, by comma")
    parser.add_argument("--threads", type=int, default=2, help="threads in all, the same for everyone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--compare", action="store_true", help="transformers' continuous batching too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prompts, expected = workload(options.prompts)
    runs = {f"shoal -tp {tp}": shoal_run(tp, options.threads) for tp in map(int, options.tp.split(","))}
    if options.compare:
        runs["transformers continuous batching"] = transformers_run(options.threads)
    rows = measure(runs, prompts, expected, options.repeats)
    if options.json:
        print(json.dumps({"prompts": len(prompts), "threads": options.threads, "rows": rows}))
    else:
        for row in rows:
            ratio = row["tokens_per_s"] / rows[0]["tokens_per_s"]
            speed = f"{row['tokens_per_s']:7.1f} tokens/s  {ratio:5.2f}"
            print(f"{row['name']:34} {speed}  {row['differing']} differ")
    # The rule of equality allows 1% of the requests to differ at a tie.
    return int(any(row["differing"] > len(prompts) / 100 for row in rows if row["name"].startswith("shoal")))


if __name__ == "__main__":
    sys.exit(main())
