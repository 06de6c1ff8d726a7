"""What weights in fewer bits bring and cost: decoding of one request, and perplexity, against whole weights.

    python benchmarks/quantization.py [--model demo] [--num-threads 2] [--repeats 5] [--texts 32] [--json F]

Speed: engines of every storage side by side in one process answer the same prompt of 130 tokens with 64
greedy ones, in turn, every other round backwards; tokens per second are those after the first token, the
ratio is over float32 of the same round, and figures are medians. Perplexity: of GSM8K questions with their
answers (``tests/data``), each read from its beginning. Knows no kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shoal import LLM, SamplingParams
from shoal.attention.cpu import CpuPaged
from shoal.bench.perplexity import perplexity
from shoal.checkpoint.source import resolve
from shoal.jit.team import Team

STORAGES = ("float32", "int8", "int4")
TEXTS = Path(__file__).parent.parent / "tests" / "data" / "gsm8k-test-128.jsonl"
PROMPT_TOKENS, OUTPUT_TOKENS = 130, 64


def load_texts(count: int) -> list[str]:
    """Questions with their answers."""
    lines = [json.loads(line) for line in TEXTS.read_text().splitlines()[:count]]
    return [f"{line['question']}\n{line['answer']}" for line in lines]


def decode_seconds(engine: LLM, prompt: list[int]) -> float:
    """Of one request, from its first token to its last."""
    seconds = []
    for tokens in (1, OUTPUT_TOKENS):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        started = time.perf_counter()
        engine.generate([{"prompt_token_ids": prompt}], params)
        seconds.append(time.perf_counter() - started)
    return seconds[1] - seconds[0]


def speeds(model: str, num_threads: int, repeats: int, prompt: list[int]) -> dict[str, dict[str, float]]:
    """Tokens per second of each storage, and its ratio to float32."""
    options: dict[str, Any] = {"num_threads": num_threads, "enable_prefix_caching": False, "dtype": "float32"}
    engines = {
        storage: LLM(model, **options, **({} if storage == "float32" else {"quantization": storage}))
        for storage in STORAGES
    }
    rounds: list[dict[str, float]] = []
    try:
        for engine in engines.values():
            decode_seconds(engine, prompt)
        for number in range(repeats):
            order: Sequence[str] = STORAGES if number % 2 == 0 else STORAGES[::-1]
            rounds.append({storage: decode_seconds(engines[storage], prompt) for storage in order})
    finally:
        for engine in engines.values():
            engine.shutdown()
    return {
        storage: {
            "tokens_per_s": (OUTPUT_TOKENS - 1) / statistics.median(found[storage] for found in rounds),
            "ratio": statistics.median(found["float32"] / found[storage] for found in rounds),
        }
        for storage in STORAGES
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from transformers import AutoTokenizer

    path = resolve(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [torch.tensor(tokenizer(text).input_ids) for text in load_texts(args.texts)]
    prompt = torch.cat(texts)[:PROMPT_TOKENS].tolist()
    found = speeds(args.model, args.num_threads, args.repeats, prompt)
    team = Team(args.num_threads)
    kernel = CpuPaged(team)
    for storage in STORAGES:
        found[storage]["perplexity"] = perplexity(path, storage, kernel, texts)
    team.close()
    whole = found["float32"]["perplexity"]
    print(f"{'storage':10} {'tokens/s':>9} {'ratio':>6} {'perplexity':>11} {'ratio':>7}")
    for storage, row in found.items():
        row["perplexity_ratio"] = row["perplexity"] / whole
        print(
            f"{storage:10} {row['tokens_per_s']:9.1f} {row['ratio']:6.2f} {row['perplexity']:11.3f} "
            f"{row['perplexity_ratio']:7.4f}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"arguments": vars(args) | {"json": None}, "found": found}, indent=1))


if __name__ == "__main__":
    main()
