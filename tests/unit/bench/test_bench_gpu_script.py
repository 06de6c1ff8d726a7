"""``benchmarks/gpu/run.py`` says how each section went, whatever the machine and whatever a section does."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(out: Path, device: str = "cpu") -> argparse.Namespace:
    return argparse.Namespace(out=out, device=device, model="demo", scale="ci", only=None)


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    status: int = script.main()
    return status


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_everything_is_skipped_with_the_reason(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        script, "run_apart", lambda name, options, limit_s: script.run_here(name, options)
    )  # a process each would only take time here
    assert run(script, monkeypatch, "--out", str(tmp_path)) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == list(script.SECTIONS)
    assert {found["status"] for found in summary.values()} == {"skipped"}
    assert all("no such device here: 'cuda'" in found["reason"] for found in summary.values())


def test_a_section_runs_in_a_process_of_its_own(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(script, monkeypatch, "--out", str(tmp_path), "--device", "cpu", "--sections", "attention") == 0
    found = json.loads((tmp_path / "summary.json").read_text())["attention"]
    assert found["status"] == "passed", found
    assert found["torch.float32"]["largest_error"] < 1e-4
    assert found["seconds"] > 0


def test_a_section_is_ended_at_its_limit(script: ModuleType, tmp_path: Path) -> None:
    found = script.run_apart("device", options(tmp_path), 0.05)
    assert (found["status"], found["reason"]) == ("failed", "not done within 0 s")


def test_a_section_that_fails_fails_alone(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(_: Any) -> Any:
        raise script.Wrong("3 is not 4")

    monkeypatch.setitem(script.SECTIONS, "memory", (wrong, 1.0))
    monkeypatch.setattr(script, "run_apart", lambda name, options, limit_s: script.run_here(name, options))
    assert (
        run(script, monkeypatch, "--out", str(tmp_path), "--device", "cpu", "--sections", "memory,device")
        == 1
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["memory"] == {"status": "failed", "reason": "Wrong: 3 is not 4"}
    assert summary["device"]["status"] == "passed"


def test_no_section_outlasts_the_whole(script: ModuleType) -> None:
    assert script.TOTAL_S < 360
    assert all(limit_s < script.TOTAL_S for _, limit_s in script.SECTIONS.values())


def test_unknown_sections_are_wrong_usage(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(script, monkeypatch, "--out", str(tmp_path), "--sections", "warp")
    assert ended.value.code == 2
