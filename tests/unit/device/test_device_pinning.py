"""Ranks get cores of their own, or none is pinned."""

from __future__ import annotations

import os
import threading

import pytest

from shoal.device import pinning
from shoal.device.pinning import pin_thread, rank_cores

linux_only = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity masks here")


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "dealt"),
    [
        (2, 1, {0, 1}, [[0], [1]]),
        (1, 2, {4, 9}, [[4, 9]]),
        (2, 2, {3, 5, 7, 9}, [[3, 5], [7, 9]]),
        (3, 1, {0, 1, 2, 3}, [[1], [2], [3]]),
        (2, 3, set(range(8)), [[2, 3, 4], [5, 6, 7]]),
    ],
)
def test_ranks_share_nothing_and_leave_the_lowest_cores(
    ranks: int, threads: int, cores: set[int], dealt: list[list[int]]
) -> None:
    assert [rank_cores(rank, ranks, threads, cores=cores) for rank in range(ranks)] == dealt


def test_nothing_is_pinned_where_threads_exceed_the_cores() -> None:
    assert [rank_cores(rank, 2, 2, cores={0, 1, 2}) for rank in range(2)] == [None, None]


def test_replicas_share_nothing_either_and_the_one_that_does_not_fit_floats() -> None:
    cores = set(range(5))
    assert [rank_cores(r, 2, 1, replica, cores) for replica in (0, 1, 2) for r in (0, 1)] == [
        [3], [4], [1], [2], None, None
    ]  # fmt: skip


@linux_only
def test_nothing_is_pinned_where_a_quota_leaves_less_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.sched_getaffinity(0)
    assert rank_cores(0, 1, 1) == [max(mine)]
    monkeypatch.setattr(pinning, "usable_cores", lambda: len(mine) - 1)
    assert rank_cores(0, 1, 1) is None


@linux_only
def test_a_thread_and_those_it_starts_keep_to_their_cores_and_others_do_not() -> None:
    mine = os.sched_getaffinity(0)
    seen = []

    def pinned() -> None:
        pin_thread({max(mine)})
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert seen == [{max(mine)}] * 2
    assert os.sched_getaffinity(0) == mine
