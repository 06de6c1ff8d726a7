"""Cores, threads and instruction sets of the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.device.cpu import CpuDevice, bfloat16_instructions, threads_per_rank, usable_cores


def test_a_cgroup_quota_below_the_affinity_mask_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    assert usable_cores(tmp_path, tmp_path) == 8
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert usable_cores(tmp_path, tmp_path) == 3
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path, tmp_path) == 1


def test_without_affinity_masks_every_core_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path, tmp_path) == 6


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(1, 8, 8), (3, 8, 2), (8, 8, 1), (9, 8, 1)])
def test_ranks_share_the_cores_evenly_and_never_get_none(ranks: int, cores: int, threads: int) -> None:
    assert threads_per_rank(ranks, cores) == threads


def test_threads_default_to_the_cores_this_process_may_use() -> None:
    assert threads_per_rank(1) == usable_cores()


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fpu avx2 avx512_bf16 amx_bf16", "amx_bf16"),
        ("fpu avx512_bf16", "avx512_bf16"),
        ("fpu avx2 avx512f", None),
    ],
)
def test_bfloat16_is_fast_only_with_amx_or_avx512_bf16(tmp_path: Path, flags: str, found: str | None) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\nbugs : x\n")
    assert bfloat16_instructions(tmp_path) == found


def test_a_machine_without_cpuinfo_has_no_fast_bfloat16(tmp_path: Path) -> None:
    assert bfloat16_instructions(tmp_path) is None


def test_every_rank_has_the_same_cpu() -> None:
    device = CpuDevice()
    assert device.for_rank(3) == device
    assert device.max_ranks is None
    assert device.memory().free > 0
    assert "CPU core" in device.description()
    device.activate()
    device.synchronize()
