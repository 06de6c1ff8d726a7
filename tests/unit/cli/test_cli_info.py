"""``shoal info`` and ``shoal pull``: facts on stdout, as text or as one JSON document."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import pytest


def test_info_names_versions_memory_and_the_kernel(run):
    facts = json.loads(run("info", "--json", "--device", "cpu").out)
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["versions"]["torch"] == version("torch")
    assert facts["device"] == "cpu" and facts["cores"] >= 1
    [cpu] = [device for device in facts["devices"] if device["name"] == "cpu"]
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]
    assert facts["attention"]["kernel"] and facts["attention"]["reason"]


def test_info_as_text_marks_the_device_in_use(run):
    lines = run("info", "--device", "cpu").out.splitlines()
    assert any("cpu:" in line and line.endswith("<- used") for line in lines)
    assert any(line.startswith("attention") for line in lines)


@pytest.mark.parametrize(("flags", "expected"), [([], "/models/x\n"), (["--json"], None)])
def test_pull_prints_the_folder(run, monkeypatch, flags, expected):
    asked = []
    monkeypatch.setattr("shoal.cli.pull._fetch", lambda *given: asked.append(given) or Path("/models/x"))
    ended = run("pull", "org/x", "--revision", "main", *flags)
    assert (ended.status, asked) == (0, [("org/x", "main")])
    if expected is None:
        assert json.loads(ended.out) == {"model": "org/x", "folder": "/models/x"}
    else:
        assert ended.out == expected
