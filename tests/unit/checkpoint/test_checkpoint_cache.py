"""Making a folder once, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.checkpoint.cache import build_once
from shoal.errors import UsageError


def test_the_second_call_does_not_build(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "a").write_text("1")

    target = tmp_path / "deep" / "model"
    assert build_once(target, build) == build_once(target, build) == target
    assert len(built) == 1
    assert (target / "a").read_text() == "1"
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_failed_build_leaves_nothing_behind_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    assert build_once(tmp_path / "model", lambda folder: None).is_dir()


def test_what_a_killed_process_left_half_done_is_cleared(tmp_path: Path) -> None:
    target = tmp_path / "model"
    script = (
        "import os, pathlib, sys\n"
        "from shoal.checkpoint.cache import build_once\n"
        "def build(folder):\n"
        "    (folder / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), 9)\n"
        "build_once(pathlib.Path(sys.argv[1]), build)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(target)]).returncode == -9
    assert not target.exists()
    build_once(target, lambda folder: (folder / "whole").touch())
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


def test_two_at_once_build_once(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        started.set()
        assert go_on.wait(10)

    threads = [threading.Thread(target=build_once, args=(tmp_path / "model", build)) for _ in range(2)]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(built) == 1
    assert (tmp_path / "model").is_dir()


def test_a_cache_folder_that_cannot_be_written_is_the_users_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="SHOAL_HOME"):
        build_once(tmp_path / "file" / "model", lambda folder: None)
