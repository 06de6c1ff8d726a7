"""Ranks agree on one transport, and the reason is said."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shoal.comm import choose
from shoal.comm.choose import share_memory
from shoal.comm.meeting import exchange_over, exchange_through
from shoal.comm.private import PrivateComm
from shoal.comm.shm import ShmComm
from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.comm.torch_dist import open_store
from shoal.errors import RankError


def on_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(function, rank) for rank in range(size)]]


def shared(size: int, wanted: Any = "auto", generation: int = 0) -> list[ShmComm | None]:
    store, address = open_store()

    def join(rank: int) -> ShmComm | None:
        exchange = exchange_through(address if rank else store, rank, size, 60, generation)
        return share_memory(rank, size, exchange, 60, wanted)

    return on_ranks(size, join)


def test_ranks_of_one_host_share_memory_and_rank_0_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shoal.comm"):
        comms = shared(3)
    assert all(isinstance(comm, ShmComm) for comm in comms)
    assert [record.message for record in caplog.records] == ["3 ranks sum over shared memory"]
    sums = on_ranks(3, lambda rank: comms[rank].all_reduce(torch.tensor([rank + 1])).item())  # type: ignore[union-attr]
    assert sums == [6, 6, 6]


def test_ranks_on_two_hosts_do_not(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    hosts = iter(["a", "b"])
    monkeypatch.setattr(choose, "host_identity", lambda: next(hosts))
    with caplog.at_level(logging.INFO, "shoal.comm"):
        assert shared(2) == [None, None]
    assert [record.message for record in caplog.records] == [
        "2 ranks sum over gloo (rank 1 is on another host than rank 0, or another user's)"
    ]


def test_more_ranks_than_fit_do_not() -> None:
    assert shared(9) == [None] * 9


def test_without_numba_they_do_not_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "shoal.comm.shm":
            raise ImportError("No module named 'numba'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.INFO, "shoal.comm"):
        assert shared(2) == [None, None]
    assert "gloo (rank 0: No module named 'numba')" in caplog.text


def test_one_rank_that_cannot_map_it_keeps_all_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, num_bytes: int) -> Any:
        raise PermissionError("no way")

    monkeypatch.setattr(choose.Segment, "attach", refuse)
    assert shared(3) == [None] * 3
    with pytest.raises(RankError, match="no memory to share between the ranks: rank 1: no way"):
        shared(2, wanted="shm")


def test_another_generation_is_neither_heard_nor_disturbed() -> None:
    store, address = open_store()
    old = exchange_through(address, 1, 2, 0.2, generation=0)
    with pytest.raises(RankError, match="rank 1 could not join its group"):
        old("words of long ago")
    told = on_ranks(2, lambda rank: exchange_through(address, rank, 2, 60, generation=1)(f"new {rank}"))
    assert told == [["new 0", "new 1"]] * 2
    del store


def test_a_rank_that_does_not_come_is_an_error_within_the_deadline() -> None:
    store, _ = open_store()
    with pytest.raises(RankError, match="rank 0 could not join its group"):
        share_memory(0, 2, exchange_through(store, 0, 2, 0.2), 0.2)


def test_words_of_any_length_go_over_a_group_that_exists() -> None:
    def tell(comm: SimulatedComm) -> list[str]:
        exchange = exchange_over(comm)
        return [*exchange("x" * (comm.rank + 1)), *exchange(f"ünïcode {comm.rank}")]

    for told in run_ranks(3, tell):
        assert told == ["x", "xx", "xxx", "ünïcode 0", "ünïcode 1", "ünïcode 2"]


@pytest.mark.parametrize(("wanted", "kind"), [("auto", ShmComm), ("shm", ShmComm), ("gloo", PrivateComm)])
def test_a_private_group_is_what_was_asked_for(wanted: Any, kind: type) -> None:
    store, address = open_store()

    def join(rank: int) -> Any:
        meeting = address if rank else store
        return choose.join_private_group(rank, 2, meeting, torch.device("cpu"), 60, wanted)

    comms = on_ranks(2, join)
    assert [type(comm) for comm in comms] == [kind, kind]
    assert on_ranks(2, lambda rank: comms[rank].all_reduce(torch.ones(1)).item()) == [2, 2]
    for comm in comms:
        comm.close()
