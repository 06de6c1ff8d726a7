"""The CPU as a device: how many cores this process may use, and what they are fast at. Knows no model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.device.cgroup import CGROUP_ROOT, PROC_ROOT, cpu_quota
from shoal.device.memory import MemoryReport, host_memory

__all__ = ["CpuDevice", "bfloat16_instructions", "threads_per_rank", "usable_cores"]

# x86 instruction sets that multiply bfloat16 matrices, by their names in /proc/cpuinfo. Without one of
# them torch's bfloat16 products run at a hundredth of the speed of its float32 ones.
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")


def usable_cores(proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Cores this process may use: its affinity mask, or its cgroup's quota if that is less. At least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity masks
        cores = os.cpu_count() or 1
    quota = cpu_quota(proc_root, cgroup_root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def threads_per_rank(ranks: int, cores: int | None = None) -> int:
    """Threads one of ``ranks`` equal processes should compute with. At least 1.

    Args:
        ranks: processes that share the machine.
        cores: cores they share; None: :func:`usable_cores`.
    """
    return max(1, (usable_cores() if cores is None else cores) // ranks)


def bfloat16_instructions(proc_root: Path = PROC_ROOT) -> str | None:
    """The instruction set that makes bfloat16 products fast on this CPU; None if it has none we know."""
    try:
        text = (proc_root / "cpuinfo").read_text()
    except OSError:  # macOS: no CPU of Apple's has either of these
        return None
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return next((flag for flag in _BFLOAT16_FLAGS if flag in flags), None)


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The host's cores; every rank has the same device and a share of the cores."""

    kind: str = "cpu"
    index: int | None = None

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def visible_count(self) -> int:
        return 1

    @property
    def max_ranks(self) -> int | None:
        return None

    def for_rank(self, rank: int) -> CpuDevice:
        return self

    def activate(self) -> None:
        return None

    def description(self) -> str:
        instructions = bfloat16_instructions()
        return f"{usable_cores()} CPU cores" + (f" with {instructions}" if instructions else "")

    def memory(self) -> MemoryReport:
        return host_memory()

    def synchronize(self) -> None:
        return None

    def supports(self, dtype: torch.dtype) -> bool:
        return True

    def random_state(self) -> torch.Tensor | None:
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        raise AssertionError("a CPU has no random generator of its own")
