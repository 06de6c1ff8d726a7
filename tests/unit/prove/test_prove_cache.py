"""A plan's key changes with everything the proof depends on, and with nothing else."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.prove.cache import plan_key


def key(**settings: Any) -> str:
    return plan_key(LlamaForCausalLM, LlamaConfig(**settings), 2)


def test_structure_counts_and_names_do_not() -> None:
    assert key() == key(name_or_path="elsewhere", dtype="bfloat16")
    assert key() != key(hidden_size=2048)
    assert plan_key(LlamaForCausalLM, LlamaConfig(), 2) != plan_key(LlamaForCausalLM, LlamaConfig(), 4)


def test_values_that_are_no_json_have_keys_too() -> None:
    odd = {1: {"b", "a"}, "x": (1, 2), "path": Path("/a")}
    same = {"path": Path("/a"), "x": (1, 2), 1: {"a", "b"}}
    assert key(odd=odd) == key(odd=same) != key(odd={**odd, "x": (2, 1)})


def test_every_file_of_custom_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's file may be the same while a file it imports is not."""
    (tmp_path / "modeling.py").write_text("class Model(Base):\n    pass\n")
    (tmp_path / "helpers.py").write_text("SCALE = 1\n")
    module = types.ModuleType("transformers_modules.tiny.modeling")
    module.__file__ = str(tmp_path / "modeling.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model_class = type("Model", (LlamaForCausalLM,), {"__module__": module.__name__})
    before = plan_key(model_class, LlamaConfig(), 2)
    assert plan_key(model_class, LlamaConfig(), 2) == before
    (tmp_path / "helpers.py").write_text("SCALE = 2\n")
    assert plan_key(model_class, LlamaConfig(), 2) != before
