"""The pool of rank processes reports what goes wrong, and is usable afterwards."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from support.rank_pool import RankPool, RankPoolError


def total(comm: Any, value: int) -> int:
    return int(comm.all_reduce(torch.tensor([value + comm.rank])))


def fails_on_one(comm: Any, rank: int) -> None:
    """The others wait for it in a collective."""
    if comm.rank == rank:
        raise ValueError("as asked")
    comm.all_reduce(torch.ones(1))


def dies_on_one(comm: Any, rank: int) -> None:
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.ones(1))


def hangs(comm: Any) -> None:
    """One rank never comes to the collective: it waits for a signal that nobody sends."""
    if comm.rank == 1:
        signal.pause()
    comm.all_reduce(torch.ones(1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_group_runs_a_job_and_answers_in_rank_order(rank_pool: RankPool, ranks: int) -> None:
    expected = sum(range(5, 5 + ranks))
    assert rank_pool.run(total, 5, ranks=ranks) == [expected] * ranks


@pytest.mark.full
def test_a_job_that_fails_dies_or_hangs_is_reported_and_the_next_one_runs(rank_pool: RankPool) -> None:
    with pytest.raises(RankPoolError, match=r"rank 1: Traceback[\s\S]*as asked"):
        rank_pool.run(fails_on_one, 1, ranks=3)
    with pytest.raises(RankPoolError, match="rank 2: died with status -9"):
        rank_pool.run(dies_on_one, 2, ranks=3)
    with pytest.raises(RankPoolError, match="rank 1 did not answer"):
        rank_pool.run(hangs, ranks=2, timeout_s=1)
    assert rank_pool.run(total, 1, ranks=2) == [3, 3]
