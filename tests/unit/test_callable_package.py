"""``shoal.plan`` and ``shoal.prove`` are functions and packages at once."""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_shoal_and_naming_the_planner_imports_nothing_heavy() -> None:
    out = python("import shoal, sys; shoal.plan; print(callable(shoal.plan), 'torch' in sys.modules)")
    assert out == "True False\n"


@pytest.mark.parametrize("first", ["", "import shoal.plan.types, shoal.prove.prove; "])
def test_they_are_called_whatever_was_imported_before(first: str) -> None:
    code = (
        "import transformers as T, shoal; "
        "config = T.GPT2Config(vocab_size=101, n_embd=96, n_layer=2, n_head=6, n_positions=64); "
        "model = T.GPT2LMHeadModel(config); plan = shoal.plan(model, tp=1); "
        "import shoal.plan.derive; print(shoal.plan(model, tp=1) == plan, shoal.prove(plan)['proved'])"
    )
    assert python(first + code) == "True True\n"
