"""At published widths a plan is the one of the tiny model, and costs seconds and megabytes.

The fast suite takes a seeded few families at one rank count. They run in processes of their own, several to a
process, so that the peak of memory is theirs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from support.zoo.published import PUBLISHED

RANKS = (2, 4, 8)
SEED = 7
FAMILIES_A_PROCESS = 6
MAX_SECONDS = 10.0
MAX_BYTES = 2 << 30
MAX_DIFFERENCE = 0.02  # of the column-row share

NARROWER = {
    (
        "codegen",
        8,
    ): "its fused projection holds four groups of heads (mp_num), and two ranks do not share one",
}
"""What is split less at this width and rank count than at tiny ones, and why."""


def batches() -> list[Any]:
    """(ranks, names) for one process each: a seeded few for CI, then all."""
    names = sorted(PUBLISHED)
    draw = random.Random(SEED)
    fast = draw.sample(names, 3)
    cells = [pytest.param(draw.choice(RANKS), fast, marks=pytest.mark.slow, id="sampled")]
    for ranks in RANKS:
        for at in range(0, len(names), FAMILIES_A_PROCESS):
            some = names[at : at + FAMILIES_A_PROCESS]
            cells.append(pytest.param(ranks, some, marks=pytest.mark.full, id=f"{ranks}-{some[0]}"))
    return cells


@pytest.mark.parametrize(("ranks", "names"), batches())
def test_published_widths_are_planned_like_tiny_ones_within_seconds_and_two_gigabytes(
    ranks: int, names: list[str]
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.zoo.widths", str(ranks), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == names
    for row in rows:
        print(row)
        is_alike = not row["differing"] and row["share"] >= row["tiny_share"] - MAX_DIFFERENCE
        assert is_alike != ((row["name"], ranks) in NARROWER), row
        assert row["seconds"] < MAX_SECONDS, row
        assert row["peak_bytes"] < MAX_BYTES, row
