"""How many bytes a device has, and how many are left. Knows no model and decides nothing.

The figures of MPS and CUDA come from calls this project's tests make against stand-ins for
``torch.mps`` and ``torch.cuda`` only: no such hardware has run this file in its tests.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.device.cgroup import CGROUP_ROOT, PROC_ROOT, memory_limits
from shoal.errors import ConfigError

__all__ = [
    "MemoryReport",
    "accelerator_memory",
    "host_memory",
    "mps_memory",
    "peak_rss_bytes",
    "process_private_bytes",
]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """One device's memory at one instant, in bytes."""

    total: int  # what this process could have if it were alone
    allocated: int  # in tensors of this process (CPU: this process's private memory)
    reserved: int  # taken from the system for this process, allocated or not
    free: int  # what can still be allocated


def mps_memory(mps: Any = None) -> MemoryReport:
    """Memory of Apple's GPU, which shares the host's. Run with a stand-in for ``torch.mps`` only.

    Total is Metal's recommended working set; free is what neither tensors nor the driver's pool hold.

    Args:
        mps: the module to ask; None: ``torch.mps``.

    Raises:
        ConfigError: this torch has not one of the three functions asked; the message names it.
    """
    mps = torch.mps if mps is None else mps
    total = _mps_figure(mps, "recommended_max_memory")
    allocated = _mps_figure(mps, "current_allocated_memory")
    reserved = _mps_figure(mps, "driver_allocated_memory")
    return MemoryReport(total, allocated, reserved, max(0, total - max(allocated, reserved)))


def _mps_figure(mps: Any, name: str) -> int:
    function: Callable[[], int] | None = getattr(mps, name, None)
    if function is None:
        raise ConfigError(
            f"device: torch {torch.__version__} has no torch.mps.{name}, which memory on MPS is read from; "
            "upgrade torch, or pass --device cpu",
            field="device",
        )
    return int(function())


def accelerator_memory(index: int, backend: Any = None) -> MemoryReport:
    """Memory of one CUDA (or XPU) device. Run with a stand-in for ``torch.cuda`` only.

    Free is the driver's figure plus what torch's allocator holds without using: both can be allocated.

    Args:
        index: the device's number among the visible ones.
        backend: ``torch.cuda`` or ``torch.xpu``; None: ``torch.cuda``.
    """
    backend = torch.cuda if backend is None else backend
    driver_free, total = backend.mem_get_info(index)
    allocated, reserved = backend.memory_allocated(index), backend.memory_reserved(index)
    return MemoryReport(int(total), int(allocated), int(reserved), int(driver_free + reserved - allocated))


def host_memory(proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT) -> MemoryReport:
    """Main memory as this process may use it: a cgroup's limit if there is one, else what is installed.

    Free is the least of what the system says is available and what each cgroup limit leaves: limit less
    usage, page cache that the kernel can drop counted as free.
    """
    total, free = _physical(proc_root)
    for limit in memory_limits(proc_root, cgroup_root):
        total, free = min(total, limit.limit), min(free, limit.free)
    own = process_private_bytes(proc_root)
    return MemoryReport(total, own, own, free)


def _physical(proc_root: Path) -> tuple[int, int]:
    """Bytes installed and bytes available in the whole machine."""
    figures = _kilobyte_lines(proc_root / "meminfo")
    if "MemTotal" in figures and "MemAvailable" in figures:
        return figures["MemTotal"], figures["MemAvailable"]
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def process_private_bytes(proc_root: Path = PROC_ROOT) -> int:
    """Bytes that would come free if this process ended: its private clean and dirty pages.

    From ``/proc/self/smaps_rollup``; where there is none, psutil's unique set size (macOS).
    """
    figures = _kilobyte_lines(proc_root / "self" / "smaps_rollup")
    if "Private_Clean" in figures and "Private_Dirty" in figures:
        return figures["Private_Clean"] + figures["Private_Dirty"]
    return int(psutil.Process().memory_full_info().uss)


def peak_rss_bytes(proc_root: Path = PROC_ROOT) -> int:
    """The most bytes this process ever had in memory: VmHWM, or getrusage's figure where there is none."""
    figures = _kilobyte_lines(proc_root / "self" / "status")
    if "VmHWM" in figures:
        return figures["VmHWM"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere: getrusage(2)


def _kilobyte_lines(path: Path) -> dict[str, int]:
    """The lines ``Name: 123 kB`` of a /proc file, in bytes. Empty if there is no such file."""
    try:
        text = path.read_text()
    except OSError:  # not Linux, or a kernel without this file: the caller asks elsewhere
        return {}
    figures = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            figures[name] = int(words[0]) * 1024
    return figures
