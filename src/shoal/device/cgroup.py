"""What Linux control groups allow this process: bytes of memory and cores. Knows no torch and no device.

A container's limits are not in ``/proc/meminfo`` or ``os.cpu_count()``; they stand in the cgroup file
system, in version 1, version 2 or both at once, and every ancestor's limit holds as well. Paths are
parameters, so that tests bring a tree of their own. Formats: cgroups(7), the kernel's
``Documentation/admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["CGROUP_ROOT", "PROC_ROOT", "MemoryLimit", "cpu_quota", "memory_limits", "read_number"]

PROC_ROOT = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")

_Number = TypeVar("_Number", int, float)

# Version 1 writes "no limit" as the largest page-aligned int64; nothing real comes near 2**60 bytes.
_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One group's limit and what its members use, in bytes."""

    limit: int
    usage: int  # page cache included
    reclaimable: int  # inactive page cache, which the kernel gives back under pressure

    @property
    def free(self) -> int:
        """Bytes that can still be allocated under this limit."""
        return max(0, self.limit - self.usage + self.reclaimable)


def memory_limits(proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT) -> list[MemoryLimit]:
    """Every memory limit that holds for this process, its own group's first. Empty if there is none."""
    limits = []
    for group in _groups("memory", proc_root, cgroup_root):
        limit = _least(read_number(group / name) for name in _LIMIT_FILES)
        if limit is None or limit >= _UNLIMITED_BYTES:
            continue
        usage = _first(read_number(group / name) for name in _USAGE_FILES)
        limits.append(MemoryLimit(limit, usage or 0, _inactive_file(group)))
    return limits


def cpu_quota(proc_root: Path = PROC_ROOT, cgroup_root: Path = CGROUP_ROOT) -> float | None:
    """The smallest CPU bandwidth limit that holds for this process, in cores; None if there is none."""
    return _least(_group_cores(group) for group in _groups("cpu", proc_root, cgroup_root))


# memory.high is a limit too: above it the kernel slows a group down until it is below again.
_LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USAGE_FILES = ("memory.current", "memory.usage_in_bytes")


def _groups(controller: str, proc_root: Path, cgroup_root: Path) -> Iterator[Path]:
    """This process's group for a controller and the group's ancestors, in both versions' trees.

    In a container the path in ``/proc/self/cgroup`` may be the host's, of which only the mount's root is
    visible: folders that are not there are left out.
    """
    for line in _lines(proc_root / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2, alone or beside version 1
            mounts = [cgroup_root, cgroup_root / "unified"]
        elif controller in controllers.split(","):
            mounts = [cgroup_root / controller, cgroup_root / controllers]
        else:
            continue
        parts = [part for part in path.strip().split("/") if part not in ("", ".", "..")]
        for mount in dict.fromkeys(mount.resolve() for mount in mounts if mount.is_dir()):
            for depth in range(len(parts), -1, -1):
                group = mount.joinpath(*parts[:depth])
                if group.is_dir():
                    yield group


def _inactive_file(group: Path) -> int:
    """Inactive page cache of a group and its descendants, in bytes."""
    values: dict[str, int] = {}
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            values[name] = int(value)
    # Version 1 gives the group's own figure plainly and the hierarchy's with "total_" in front.
    return values.get("total_inactive_file", values.get("inactive_file", 0))


def _group_cores(group: Path) -> float | None:
    """One group's bandwidth limit in cores: version 2's ``cpu.max`` ("quota period"), or version 1's pair."""
    words = next(iter(_lines(group / "cpu.max")), "").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    quota, period = (read_number(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return quota / period if quota and period and quota > 0 else None


def read_number(path: Path) -> int | None:
    """The integer a one-line file holds; None if it is not there or says something else ("max")."""
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.removeprefix("-").isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not this version, not mounted, or not readable: the same as no limit
        return []


def _least(values: Iterable[_Number | None]) -> _Number | None:
    return min((value for value in values if value is not None), default=None)


def _first(values: Iterable[int | None]) -> int | None:
    return next((value for value in values if value is not None), None)
