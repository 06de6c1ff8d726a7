"""The kill test in all its ways at two and three ranks, written down with the date and the machine.

    PYTHONPATH=tests python -m chaos.kill_matrix [demo|tiny|MODEL] --output FILE.json [--rounds 20] [--seed N]

Kills at two and at three ranks, and the other ways at two, have 20 rounds; the other ways at three have 5.
Each cell is written as soon as it is there; what the file has already is not run again, so that the same
command goes on with an interrupted run. Beside ``FILE.json`` stands ``FILE.md`` for people. Status 1 if a
cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from chaos.kill import WAYS, model_of, moments_of, run
from chaos.kill_report import MOMENTS, spread
from chaos.streams import Stream

__all__ = ["SHORT", "WHOLE", "markdown"]

Cell = Mapping[str, Any]

WHOLE = (("kill", 2), ("kill", 3), ("stop", 2), ("raise", 2), ("hang", 2))  # way, ranks
SHORT = (("stop", 3), ("raise", 3), ("hang", 3))
_COUNTS = ("num_streams", "num_different", "num_restarts", "num_replayed")


def markdown(results: Mapping[str, Any]) -> str:
    """The results as a table, and what failed below it."""
    lines = [
        f"# Ranks lost under load, {results['date']}",
        "",
        f"`{results['command']}` on {results['machine']}. Seconds: least / median / most.",
        "",
        "| ranks | way | seed | rounds | streams | different, at ties | restarts | replayed | losses met "
        f"({', '.join(MOMENTS)}) | noticed | next token after that | cold start | minutes |",
        "|" + 13 * "---|",
    ]
    failures = []
    for name, cell in results["cells"].items():
        met = ", ".join(str(cell["hits"].get(moment, 0)) for moment in MOMENTS)
        noticed = cell["noticed_s"] if cell["way"] in ("kill", "raise") else cell["timed_out_s"]
        times = " | ".join(spread(times) for times in (noticed, cell["recovered_s"], cell["cold_s"]))
        counts = " | ".join(str(cell[name]) for name in _COUNTS)
        lines.append(
            f"| {cell['tp']} | {cell['way']} | {cell['seed']} | {len(cell['moments'])} | {counts} | {met} | "
            f"{times} | {cell['took_s'] / 60:.1f} |"
        )
        failures += [f"- {name}: {failure}" for failure in cell["failures"]]
    return "\n".join([*lines, "", *(failures or ["Nothing failed."]), ""])


def machine() -> str:
    """For people: what this ran on."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Replace the file and the table beside it, each at once."""
    for target, text in ((path, json.dumps(results, indent=1)), (path.with_suffix(".md"), markdown(results))):
        fresh = target.with_name(f".{target.name}")
        fresh.write_text(text)
        fresh.replace(target)


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--short-rounds", type=int, default=5)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--most-tokens", type=int, default=120)
    parser.add_argument("--step-timeout", type=float, default=3.0)
    parser.add_argument("-tp", type=int, nargs="+", default=[2, 3], help="only the cells at these counts")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS, help="only the cells of these ways")
    parser.add_argument(
        "--option", action="append", default=[], help="for shoal serve, as in --option=--standby-ranks"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    given = parser.parse_args()
    settings = {
        name: getattr(given, name)
        for name in ("model", "rounds", "short_rounds", "most_tokens", "step_timeout", "option")
    }
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "command": " ".join(["python -m chaos.kill_matrix", *sys.argv[1:]]),
        "settings": settings,
        "cells": {},
    }
    if given.output.exists():
        results = json.loads(given.output.read_text())
        if results["settings"] != settings:
            parser.error(f"{given.output} is of a run with other settings: {results['settings']}")
    cells = [(*cell, given.rounds) for cell in WHOLE] + [(*cell, given.short_rounds) for cell in SHORT]
    expected: dict[int, dict[int, Stream]] = {tp: {} for tp in given.tp}
    for way, tp, rounds in cells:
        name = f"{way} at {tp} ranks"
        if name in results["cells"] or tp not in given.tp or way not in given.way or not rounds:
            continue
        results["cells"][name] = cell = one(given, tp, way, rounds, expected[tp])
        write(given.output, results)
        print(f"{name}: {cell['took_s']:.0f} s", flush=True)
    print(markdown(results))
    return 1 if any(cell["failures"] for cell in results["cells"].values()) else 0


def one(given: argparse.Namespace, tp: int, way: str, rounds: int, expected: dict[int, Stream]) -> Cell:
    """One cell, and how long it took; what is said of it goes to stderr.

    Args:
        expected: what the asks bring undisturbed at ``tp`` ranks; filled in by the first cell.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = run(
            **model_of(given.model, Path(folder), given.option),
            tp=tp,
            way=way,
            moments=moments_of(rounds, random.Random(given.seed)),
            seed=given.seed,
            most_tokens=given.most_tokens,
            step_timeout_s=given.step_timeout,
            servers=max(1, min(given.servers, rounds // 5)),
            expected=expected,
        )
    print("\n".join(report.lines()), file=sys.stderr)
    return {**report.to_dict(), "took_s": round(time.monotonic() - started, 1)}


if __name__ == "__main__":
    sys.exit(main())
