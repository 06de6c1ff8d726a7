"""Texts into vectors: shoal against transformers in padded batches, in turns, and how equal they are.

    python benchmarks/embed.py MODEL --input F.jsonl [--field question] [--threads 2] [--ranks 1] [--batch 32]
        [--runs 5] [--repeat 1] [--quantization int8] [--json]

MODEL is a sentence-transformers folder or hub id that pools by the mean and normalises. Both sides tokenise.
transformers takes the texts in the order of the file, ``--batch`` at a time, padded to the longest of them,
in float32. Each run times both, the order turned about from run to run; the figure is the ratio of the
medians. Exits 1 if a vector has a cosine below 0.99999 to transformers' (0.99 with int8 weights, 0.97 with
int4), or, of unrounded weights, another nearest neighbour.
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

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
LEAST_COSINE = {None: 0.99999, "int8": 0.99, "int4": 0.97}


def read_texts(path: Path, field: str, repeat: int) -> list[str]:
    """The texts of a JSONL file, over and over."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)[field] for line in lines if line.strip()] * repeat


def transformers_side(model: str, batch: int, threads: int) -> Callable[[list[str]], Rows]:
    """Vectors by transformers' own model: mean over the mask, normalised."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    module = AutoModel.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(texts: list[str]) -> Rows:
        torch.set_num_threads(threads)
        rows = []
        for start in range(0, len(texts), batch):
            chosen = texts[start : start + batch]
            encoded = tokenizer(chosen, padding=True, truncation=True, max_length=256, return_tensors="pt")
            hidden = module(**encoded).last_hidden_state
            mask = encoded["attention_mask"][..., None].to(hidden.dtype)
            rows.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
        torch.set_num_threads(1)  # its threads would spin on the other side's cores
        return torch.cat(rows).numpy()

    return embed


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times, their ratio, and how equal the vectors are."""
    import shoal

    texts = read_texts(arguments.input, arguments.field, arguments.repeat)
    theirs = transformers_side(arguments.model, arguments.batch, arguments.threads)
    options = {} if arguments.quantization is None else {"quantization": arguments.quantization}
    threads = max(1, arguments.threads // arguments.ranks)
    with shoal.LLM(
        arguments.model, tensor_parallel_size=arguments.ranks, num_threads=threads, **options
    ) as llm:

        def ours(texts: list[str]) -> Rows:
            return np.array([one.outputs.embedding for one in llm.embed(texts)], np.float32)

        sides: list[tuple[str, Callable[[list[str]], Rows]]] = [("shoal", ours), ("transformers", theirs)]
        vectors = {name: embed(texts) for name, embed in sides}  # and warm
        seconds: dict[str, list[float]] = {name: [] for name, _ in sides}
        for run in range(arguments.runs):
            for name, embed in sides if run % 2 == 0 else sides[::-1]:
                began = time.perf_counter()
                embed(texts)
                seconds[name].append(time.perf_counter() - began)
        tokens = sum(len(one.prompt_token_ids) for one in llm.embed(texts))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    once = len(texts) // arguments.repeat
    one, other = (vectors[name][:once] for name in ("shoal", "transformers"))
    cosines = (one * other).sum(1)
    return {
        "model": arguments.model,
        "texts": len(texts),
        "tokens": tokens,
        "ranks": arguments.ranks,
        "threads": arguments.threads,
        "quantization": arguments.quantization,
        "seconds": seconds,
        "texts_per_s": {name: len(texts) / median for name, median in medians.items()},
        "ratio": medians["transformers"] / medians["shoal"],
        "cosine_min": float(cosines.min()),
        "cosine_mean": float(cosines.mean()),
        "neighbours_agree": float((_nearest(one) == _nearest(other)).mean()),
    }


def _nearest(rows: Rows) -> NDArray[np.int64]:
    """Each vector's nearest other one."""
    alike = rows @ rows.T
    np.fill_diagonal(alike, -1)
    return alike.argmax(1)


def report(found: dict[str, Any]) -> None:
    """The same for people."""
    print("{texts} texts, {tokens} tokens, {ranks} rank(s), {threads} threads".format(**found))
    for name, rate in found["texts_per_s"].items():
        print(f"{name:>14} {rate:8.1f} texts/s   {min(found['seconds'][name]):.3f} s at best")
    print(f"{'ratio':>14} {found['ratio']:8.2f}")
    print(f"cosine: least {found['cosine_min']:.7f}, mean {found['cosine_mean']:.7f}")
    print(f"nearest neighbours agree: {found['neighbours_agree']:.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--field", default="question")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        report(found)
    is_close = found["cosine_min"] >= LEAST_COSINE[arguments.quantization]
    has_same_neighbours = arguments.quantization is not None or found["neighbours_agree"] == 1.0
    return 0 if is_close and has_same_neighbours else 1


if __name__ == "__main__":
    sys.exit(main())
