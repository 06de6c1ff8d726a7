"""Compiled kernels are found again, by later processes and by those that compile at the same time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from shoal.jit.cache import cache_folder, sources_digest
from shoal.jit.compile import kernel

_PROGRAM = """
import sys
import numpy
from shoal.jit.compile import kernel

@kernel
def inner(array):
    return array.ndim

@kernel
def outer(array):
    return 2 * inner(array)

for dtype in sys.argv[1:]:
    for dimensions in range(1, 13):
        assert outer(numpy.zeros([1] * dimensions, dtype)) == 2 * dimensions
print(sum(outer.stats.cache_hits.values()), sum(outer.stats.cache_misses.values()))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    return path


def start(program: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "SHOAL_HOME": str(program.parent / "home")}
    command = [sys.executable, "-W", "error", str(program), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def hits_and_misses(process: subprocess.Popen[str]) -> tuple[int, int]:
    out, _ = process.communicate()
    assert process.returncode == 0
    hits, misses = map(int, out.split())
    return hits, misses


def test_a_second_process_compiles_nothing(program: Path) -> None:
    assert hits_and_misses(start(program, "int8")) == (0, 12)
    assert hits_and_misses(start(program, "int8")) == (12, 0)


def test_processes_that_compile_at_once_lose_nothing_of_each_other(program: Path) -> None:
    """Each for argument types of its own, which share an index file."""
    dtypes = ["int8", "int16", "int32"]
    together = [start(program, dtype) for dtype in dtypes]
    for process in together:
        assert hits_and_misses(process) == (0, 12)
    assert hits_and_misses(start(program, *dtypes)) == (36, 0)


def test_importing_shoal_compiles_nothing_and_imports_no_numba() -> None:
    code = "import sys, shoal, shoal.comm.choose; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_digest_follows_every_source_that_may_hold_kernels(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        sources_digest.cache_clear()
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".py").write_text(text)
        return sources_digest(tmp_path)

    first = digest(
        jit__a="1", cpu_kernels__b="1", room__c="from shoal.jit.compile import kernel", room__d="1"
    )
    assert digest(room__d="2") == first, "no kernel can be in it"
    seen = {first, digest(jit__a="2"), digest(cpu_kernels__b="2"), digest(room__c="# shoal.jit")}
    assert len(seen) == 4


def test_where_nothing_can_be_written_kernels_work_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "file" / "home"))

    @kernel
    def doubled(value: float) -> float:
        return value * 2

    @kernel
    def tripled(value: float) -> float:
        return value * 3

    with caplog.at_level(logging.WARNING, "shoal.jit"):
        assert doubled(2) == 4
        assert tripled(2) == 6
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "kernels are compiled anew in each process"
    ]


def test_folders_unused_for_a_month_are_removed_and_others_stay(tmp_path: Path) -> None:
    old, recent = tmp_path / "kernels" / "old", tmp_path / "kernels" / "recent"
    for folder, days in ((old, 31), (recent, 29)):
        folder.mkdir(parents=True)
        (folder / "code").touch()
        when = time.time() - days * 24 * 3600
        os.utime(folder, (when, when))
    mine = cache_folder(tmp_path)
    assert mine is not None
    assert mine.is_dir()
    assert not old.exists()
    assert recent.is_dir()


def test_a_folder_removed_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))

    @kernel
    def total(values: numpy.ndarray) -> float:
        return values.sum()

    assert total(numpy.ones(3)) == 3
    shutil.rmtree(tmp_path / "kernels")
    assert total(numpy.ones(3, numpy.float32)) == 3
    assert list(tmp_path.rglob("*.nbc"))
