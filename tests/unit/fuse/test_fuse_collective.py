"""Sums over ranks as jobs of a program. Ranks are threads, each with a team and its own end of a segment."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from shoal.attention.base import AttentionBatch, DecodeGroup
from shoal.attention.pages import allocate
from shoal.comm.shm import ShmComm, segment_bytes
from shoal.comm.shm_segment import Segment
from shoal.cpu_kernels.arguments import run_job
from shoal.errors import RankError
from shoal.fuse.collective import sum_job
from shoal.jit.team import Team
from shoal.shard import shard
from support.fusing import fuse, planned, ready, zoo_model

Result = TypeVar("Result")


def on_ranks(function: Callable[[ShmComm], Result], timeout_s: float = 60.0) -> list[Result]:
    """Of two ranks; one that fails leaves, which releases the other."""
    segment = Segment.create(segment_bytes(2))
    segment.hide()
    comms = [ShmComm(rank, segment, [os.getpid()] * 2, timeout_s, has_core=False) for rank in range(2)]

    def guarded(comm: ShmComm) -> Result:
        try:
            return function(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(guarded, comm) for comm in comms]]


@pytest.mark.parametrize("rows", [1, 300])
def test_one_thread_of_a_team_sums_for_all(rows: int) -> None:
    parts = [torch.randn(rows, 72, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def rank(comm: ShmComm) -> torch.Tensor:
        team, part = Team(2), parts[comm.rank].clone()
        try:
            for _ in range(2):
                run_job(team, sum_job, rows, 72, part.data_ptr(), comm.state_address)
            return part
        finally:
            team.close()

    for got in on_ranks(rank):
        assert torch.equal(got, 2 * (parts[0] + parts[1])), "the second time, sums are added"


@pytest.mark.parametrize("family", ["phi", "qwen3", "mixtral"])
def test_layers_over_shared_memory_prove_equal_and_run_as_one_program_but_for_foreign_parts(
    family: str,
) -> None:
    plan = planned(family, 2)

    def rank(comm: ShmComm) -> tuple[list[str], list[int]]:
        team = Team(1)
        try:
            model = zoo_model(family)
            shard(model, plan, comm.rank, comm)
            fused = fuse(ready(model, team), comm=comm)
            return fused.problems, [len(chain.stack._segments) for chain in fused._chains]
        finally:
            team.close()

    for problems, segments in on_ranks(rank):
        assert problems == []
        assert segments == ([3] if family == "mixtral" else [1])


def test_a_peer_that_has_left_is_an_error_that_names_it() -> None:
    plan = planned("llama", 2)

    def rank(comm: ShmComm) -> str:
        team = Team(1)
        try:
            model = zoo_model("llama")
            shard(model, plan, comm.rank, comm)
            parts = ready(model, team)
            fused = fuse(parts, comm=comm)
            comm.barrier()
            if comm.rank == 1:
                return ""
            fused.use_pages(allocate(parts.context.shapes, 2, 4, torch.float32, torch.device("cpu")))
            stack, given = fused._chains[0].stack, torch.zeros(1, 16)
            batch = AttentionBatch(torch.zeros(1, dtype=torch.int64), _first_token(), [])
            with pytest.raises(RankError, match="rank 1 has left the group") as caught:
                stack.run(torch.randn(1, 64), batch, [(given, given)] * 2)
            assert caught.value.rank == 1
            return "noticed"
        finally:
            team.close()

    assert on_ranks(rank) == ["noticed", ""]


def _first_token() -> DecodeGroup:
    return DecodeGroup(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
