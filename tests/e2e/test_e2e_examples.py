"""The examples of the README's parallel section run as it says: in plain Python and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PROGRAMS = {"parallel_pipelines.py": 2, "parallel_t5.py": 1}  # name -> models it compares with the whole one


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [PLAIN, TORCHRUN], ids=["plain", "torchrun"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_gives_the_whole_models_tokens(name: str, launcher: list[str]) -> None:
    done = subprocess.run(
        [*launcher, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = 1 if launcher is PLAIN else 2
    # Ranks print at once, and piece by piece.
    assert done.stdout.count("True") == ranks * PROGRAMS[name], done.stdout
    assert "False" not in done.stdout
