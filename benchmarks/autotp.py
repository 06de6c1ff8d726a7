"""Automatic tensor parallelism in numbers, as DeepSpeed's AutoTP page gives them: ranks, memory per rank,
the largest batch within a memory budget, and throughput per rank, for a T5 and an OPT with random weights.

    python benchmarks/autotp.py [--ranks 1,2] [--families t5,opt] [--budget-gib 1.75] [--threads 2] [--json]

Each line is one ``torchrun`` of this file: every rank reads its slices of a checkpoint made for the
occasion and all generate together. Memory is counted per rank: ``weights`` are the bytes of its tensors,
the budget holds the peak of resident memory less what the process held before loading. All rows of a
family must generate the same ids, or the row is no result and the program exits 1. Knows no plan.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 1 << 30
PROMPT_TOKENS, NEW_TOKENS = 64, 8
SHAPES: dict[str, dict[str, Any]] = {
    # google/t5-v1_1-base and facebook/opt-350m in shape, the latter with norms first as its siblings have
    "t5": {
        "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
    },
    "opt": {
        "vocab_size": 50272, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "ffn_dim": 4096, "word_embed_proj_dim": 1024, "max_position_embeddings": 2048,
    },
}  # fmt: skip


def make_checkpoint(family: str, folder: Path) -> None:
    """A model of the family's shape with seeded random weights."""
    import torch
    import transformers as T

    torch.manual_seed(0)
    classes = {
        "t5": (T.T5ForConditionalGeneration, T.T5Config),
        "opt": (T.OPTForCausalLM, T.OPTConfig),
    }
    model_class, config_class = classes[family]
    model_class(config_class(**SHAPES[family])).save_pretrained(folder)


# ------------------------------------------------------------------ one rank


def resident_peak() -> int:
    """Bytes of the highest resident set since it was last reset."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) << 10


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def tensor_bytes(model: Any) -> int:
    """Bytes of the unique storages of parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def run_rank(folder: str, budget: int) -> None:
    """Measure on this rank; rank 0 prints the row."""
    import torch
    import torch.distributed as dist

    import shoal

    size = int(os.environ["WORLD_SIZE"])
    reset_peak()
    before = resident_peak()
    model = shoal.parallelize(folder, tp=size, dtype=torch.float32)
    if size > 1 and not dist.is_initialized():
        raise SystemExit("parallelize left no process group")

    def highest(value: int) -> int:
        """Over ranks."""
        tensor = torch.tensor(value)
        if size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def attempt(batch: int) -> tuple[int, float, str]:
        """(peak bytes of the worst rank, seconds of the slowest, digest of the ids)."""
        ids = torch.randint(5, 1000, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
        reset_peak()
        started = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS, do_sample=False,
            )  # fmt: skip
        seconds = highest(int((time.perf_counter() - started) * 1e6)) / 1e6
        # Equal prompts in every batch size: the first row alone is compared.
        digest = hashlib.sha256(str(out[0, -NEW_TOKENS:].tolist()).encode()).hexdigest()[:12]
        return highest(resident_peak() - before), seconds, digest

    weights = highest(tensor_bytes(model))
    batch, peak, seconds, digest = largest_batch(attempt, budget)
    if int(os.environ["RANK"]) == 0:
        per_rank = batch * NEW_TOKENS / seconds / size
        row = {
            "ranks": size, "weights_bytes": weights, "batch": batch, "peak_bytes": peak,
            "tokens_per_s_per_rank": per_rank, "digest": digest,
        }  # fmt: skip
        print("ROW " + json.dumps(row), flush=True)


def largest_batch(
    attempt: Callable[[int], tuple[int, float, str]], budget: int
) -> tuple[int, int, float, str]:
    """The largest batch whose peak stays within ``budget``: doubled until it does not, then halved in."""
    attempt(1)  # warm
    best, good = (0, 0, 0.0, ""), 0
    batch = 1
    while True:
        peak, seconds, digest = attempt(batch)
        if peak > budget:
            break
        best, good = (batch, peak, seconds, digest), batch
        batch *= 2
    if not good:
        raise SystemExit(f"one sequence takes {peak / GIB:.2f} GiB, more than the budget")
    low, high = good, batch
    while high - low > max(1, low // 2):
        middle = (low + high) // 2
        peak, seconds, digest = attempt(middle)
        if peak <= budget:
            low, best = middle, (middle, peak, seconds, digest)
        else:
            high = middle
    return best


# ------------------------------------------------------------------ the table


def measure(folder: Path, ranks: int, budget: int, threads: int) -> dict[str, Any]:
    """One torchrun; its row."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, threads // ranks))}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        __file__, "--rank-of", str(folder), "--budget-bytes", str(budget),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    rows = [line.removeprefix("ROW ") for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not rows:
        raise SystemExit(f"{ranks} ranks failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return dict(json.loads(rows[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--families", default="t5,opt")
    parser.add_argument("--budget-gib", type=float, default=1.75)
    parser.add_argument("--threads", type=int, default=2, help="in all, shared by the ranks")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--budget-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of, options.budget_bytes)
        return 0
    table: dict[str, list[dict[str, Any]]] = {}
    for family in options.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(family, Path(folder))
            table[family] = [
                measure(Path(folder), int(ranks), int(options.budget_gib * GIB), options.threads)
                for ranks in options.ranks.split(",")
            ]
    if options.json:
        print(json.dumps(table))
    else:
        print_table(table, options.budget_gib)
    return int(any(len({row["digest"] for row in rows}) > 1 for rows in table.values()))


def print_table(table: dict[str, list[dict[str, Any]]], budget_gib: float) -> None:
    print(f"| model | ranks | weights per rank | largest batch in {budget_gib} GiB a rank | tok/s per rank |")
    print("|---|---|---|---|---|")
    for family, rows in table.items():
        for row in rows:
            print(
                f"| {family} | {row['ranks']} | {row['weights_bytes'] / (1 << 20):.0f} MiB | {row['batch']} "
                f"| {row['tokens_per_s_per_rank']:.1f} |"
            )


if __name__ == "__main__":
    sys.exit(main())
