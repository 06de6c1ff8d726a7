"""Bytes of devices and of this process, against stand-ins for torch's modules and fake /proc trees."""

from __future__ import annotations

import mmap
import types
from pathlib import Path

import pytest
import torch

from shoal.device.memory import (
    MemoryReport,
    accelerator_memory,
    host_memory,
    mps_memory,
    peak_rss_bytes,
    process_private_bytes,
)
from shoal.errors import ConfigError

KIB = 1024


def mps_stub(total: int, allocated: int, reserved: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        recommended_max_memory=lambda: total,
        current_allocated_memory=lambda: allocated,
        driver_allocated_memory=lambda: reserved,
    )


@pytest.mark.parametrize(("allocated", "reserved", "free"), [(30, 40, 60), (40, 30, 60), (150, 0, 0)])
def test_mps_free_is_total_less_the_larger_of_allocated_and_reserved(
    allocated: int, reserved: int, free: int
) -> None:
    assert mps_memory(mps_stub(100, allocated, reserved)) == MemoryReport(100, allocated, reserved, free)


@pytest.mark.parametrize(
    "name", ["recommended_max_memory", "current_allocated_memory", "driver_allocated_memory"]
)
def test_a_torch_without_an_mps_function_is_refused_by_name_and_version(name: str) -> None:
    stub = mps_stub(1, 1, 1)
    delattr(stub, name)
    with pytest.raises(ConfigError) as caught:
        mps_memory(stub)
    assert f"torch.mps.{name}" in str(caught.value)
    assert torch.__version__ in str(caught.value)
    assert caught.value.field == "device"


def test_mps_asks_torchs_own_module_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mps", mps_stub(10, 1, 2))
    assert mps_memory().free == 8


def test_cuda_counts_what_the_allocator_holds_unused_as_free() -> None:
    stub = types.SimpleNamespace(
        mem_get_info=lambda index: (500, 1000 + index),
        memory_allocated=lambda index: 100,
        memory_reserved=lambda index: 300,
    )
    assert accelerator_memory(1, stub) == MemoryReport(total=1001, allocated=100, reserved=300, free=700)


def fake_proc(folder: Path) -> Path:
    own = folder / "self"
    own.mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n")
    (own / "smaps_rollup").write_text(
        "00400000-7fff r--p [rollup]\nRss: 90 kB\nPrivate_Clean: 7 kB\nPrivate_Dirty: 13 kB\n"
    )
    (own / "status").write_text("Name:\tpython\nVmHWM:\t  77 kB\nVmRSS:\t 50 kB\n")
    (own / "cgroup").write_text("0::/\n")
    return folder


def test_without_a_cgroup_limit_the_host_is_what_meminfo_says(tmp_path: Path) -> None:
    report = host_memory(fake_proc(tmp_path / "proc"), tmp_path / "cgroup")
    assert report == MemoryReport(1000 * KIB, 20 * KIB, 20 * KIB, 600 * KIB)


def test_a_cgroup_limit_bounds_total_and_free(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.max").write_text(f"{400 * KIB}\n")
    (group / "memory.current").write_text(f"{300 * KIB}\n")
    (group / "memory.stat").write_text(f"inactive_file {50 * KIB}\n")
    report = host_memory(fake_proc(tmp_path / "proc"), group)
    assert (report.total, report.free) == (400 * KIB, 150 * KIB)


def test_what_others_use_outside_the_cgroup_bounds_free_too(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.max").write_text(f"{900 * KIB}\n")
    (group / "memory.current").write_text("0\n")
    report = host_memory(fake_proc(tmp_path / "proc"), group)
    assert (report.total, report.free) == (900 * KIB, 600 * KIB)


def test_private_bytes_are_private_clean_and_dirty(tmp_path: Path) -> None:
    assert process_private_bytes(fake_proc(tmp_path)) == 20 * KIB


def test_the_peak_is_vmhwm(tmp_path: Path) -> None:
    assert peak_rss_bytes(fake_proc(tmp_path)) == 77 * KIB


def test_without_proc_the_systems_own_figures_are_used(tmp_path: Path) -> None:
    assert process_private_bytes(tmp_path) > 2**20
    assert peak_rss_bytes(tmp_path) > 2**20
    assert host_memory(tmp_path, tmp_path).total > 2**28


def test_private_bytes_grow_with_what_this_process_allocates() -> None:
    size = 32 * 2**20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:  # not the heap's leftovers
        before = process_private_bytes()
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
        grown = process_private_bytes() - before
    assert 30 * 2**20 < grown < 40 * 2**20
