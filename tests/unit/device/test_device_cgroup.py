"""Limits read from cgroup trees of version 1, version 2 and both."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.device.cgroup import MemoryLimit, cpu_quota, memory_limits

NO_LIMIT_V1 = "9223372036854771712"


class Tree:
    """A fake /proc and cgroup file system."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()

    def member_of(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def write(self, path: str, text: str) -> None:
        file = self.cgroup / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def limits(self) -> list[MemoryLimit]:
        return memory_limits(self.proc, self.cgroup)

    def quota(self) -> float | None:
        return cpu_quota(self.proc, self.cgroup)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_version_2_reads_limit_usage_and_inactive_page_cache(tree: Tree) -> None:
    tree.member_of("0::/box")
    tree.write("box/memory.max", "1000")
    tree.write("box/memory.current", "700")
    tree.write("box/memory.stat", "anon 500\ninactive_file 200\nactive_file 10")
    assert tree.limits() == [MemoryLimit(limit=1000, usage=700, reclaimable=200)]
    assert tree.limits()[0].free == 500


def test_version_2_max_means_no_limit(tree: Tree) -> None:
    tree.member_of("0::/box")
    tree.write("box/memory.max", "max")
    tree.write("box/memory.high", "max")
    tree.write("box/memory.current", "700")
    assert tree.limits() == []


def test_a_throttling_limit_below_the_hard_one_counts(tree: Tree) -> None:
    tree.member_of("0::/box")
    tree.write("box/memory.max", "1000")
    tree.write("box/memory.high", "600")
    tree.write("box/memory.current", "100")
    assert [limit.limit for limit in tree.limits()] == [600]


def test_every_ancestor_of_a_nested_group_counts(tree: Tree) -> None:
    tree.member_of("0::/slice/service/box")
    tree.write("slice/service/box/memory.max", "max")
    tree.write("slice/service/memory.max", "3000")
    tree.write("slice/service/memory.current", "100")
    tree.write("slice/memory.max", "2000")
    tree.write("slice/memory.current", "1900")
    assert [(limit.limit, limit.free) for limit in tree.limits()] == [(3000, 2900), (2000, 100)]


def test_version_1_reads_its_own_file_names_and_the_hierarchys_page_cache(tree: Tree) -> None:
    tree.member_of("4:memory:/docker/abc", "1:cpu,cpuacct:/docker/abc")
    tree.write("memory/docker/abc/memory.limit_in_bytes", "4096")
    tree.write("memory/docker/abc/memory.usage_in_bytes", "1024")
    tree.write("memory/docker/abc/memory.stat", "inactive_file 1\ntotal_inactive_file 24")
    tree.write("memory/memory.limit_in_bytes", NO_LIMIT_V1)
    assert tree.limits() == [MemoryLimit(limit=4096, usage=1024, reclaimable=24)]


def test_a_path_of_the_host_falls_back_to_the_mounts_root(tree: Tree) -> None:
    """In a container /proc/self/cgroup may name a folder that only the host has."""
    tree.member_of("4:memory:/docker/not-visible-here")
    tree.write("memory/memory.limit_in_bytes", "4096")
    tree.write("memory/memory.usage_in_bytes", "96")
    assert [limit.free for limit in tree.limits()] == [4000]


def test_a_path_above_the_namespace_does_not_leave_the_mount(tree: Tree) -> None:
    tree.member_of("0::/../../other")
    tree.write("memory.max", "1000")
    assert [limit.limit for limit in tree.limits()] == [1000]


def test_both_versions_at_once_are_both_read(tree: Tree) -> None:
    tree.member_of("4:memory:/", "0::/box")
    tree.write("memory/memory.limit_in_bytes", "4096")
    tree.write("unified/box/memory.max", "1000")
    assert sorted(limit.limit for limit in tree.limits()) == [1000, 4096]


def test_usage_over_the_limit_leaves_nothing_free() -> None:
    assert MemoryLimit(limit=100, usage=150, reclaimable=0).free == 0


def test_no_cgroups_at_all_mean_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path, tmp_path) == []
    assert cpu_quota(tmp_path, tmp_path) is None


def test_version_2_quota_is_quota_over_period(tree: Tree) -> None:
    tree.member_of("0::/box")
    tree.write("box/cpu.max", "150000 100000")
    assert tree.quota() == 1.5


def test_the_smallest_quota_of_a_nested_group_counts(tree: Tree) -> None:
    tree.member_of("0::/slice/box")
    tree.write("slice/box/cpu.max", "max 100000")
    tree.write("slice/cpu.max", "200000 100000")
    assert tree.quota() == 2.0


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("50000", 0.5)])
def test_version_1_quota_of_minus_one_means_none(tree: Tree, quota: str, cores: float | None) -> None:
    tree.member_of("1:cpu,cpuacct:/")
    tree.write("cpu,cpuacct/cpu.cfs_quota_us", quota)
    tree.write("cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert tree.quota() == cores
