"""``--compile`` really compiles, in a fresh process as a rank is one.

A process in which somebody asked for ``pip``'s import spec can no longer import setuptools (its own rule,
before Python 3.12), which torch's compiler needs; a long test session is such a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_CODE = """
import torch
from shoal.attention.sdpa import paged_sdpa
from shoal.model.choose import serve_causal
from support import families

with torch.inference_mode():
    chosen = serve_causal(families.build("llama"), paged_sdpa, torch.device("cpu"), compiles=True)
print(chosen.model.way, *chosen.notes, sep="; ")
"""


def test_what_torch_compiles_gives_the_models_own_logits() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", _CODE], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("paged; "), done.stdout
    assert "; compiled in " in done.stdout, done.stdout
