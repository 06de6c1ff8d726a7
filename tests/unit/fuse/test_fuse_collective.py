"""Sums over ranks as jobs of a program. Ranks are threads, each with a team and its own end of a segment."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from shoal.attention.base import AttentionBatch, DecodeGroup, Prefill
from shoal.attention.pages import allocate
from shoal.comm.shm import SLOT_BYTES, ShmComm, segment_bytes
from shoal.comm.shm_segment import Segment
from shoal.cpu_kernels.arguments import run_job
from shoal.errors import RankError
from shoal.fuse import stack as stacks
from shoal.fuse.collective import collect_job, post_job, sum_job
from shoal.fuse.replace import FusedLayers
from shoal.fuse.stack import Stack
from shoal.jit.team import Team
from shoal.shard import shard
from support.fusing import fuse, planned, ready, zoo_model

Result = TypeVar("Result")


def on_ranks(
    function: Callable[[ShmComm], Result],
    size: int = 2,
    timeout_s: float = 60.0,
    slot_bytes: int = SLOT_BYTES,
) -> list[Result]:
    """Of ranks that are threads; one that fails leaves, which releases the others."""
    segment = Segment.create(segment_bytes(size, slot_bytes))
    segment.hide()
    processes = [os.getpid()] * size
    comms = [ShmComm(rank, segment, processes, timeout_s, False, slot_bytes) for rank in range(size)]

    def guarded(comm: ShmComm) -> Result:
        try:
            return function(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as pool:
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


def test_what_one_thread_of_a_team_posts_it_collects() -> None:
    parts = [torch.randn(5, 72, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def rank(comm: ShmComm) -> torch.Tensor:
        team, part = Team(2), parts[comm.rank].clone()
        try:
            for job in (post_job, collect_job):
                run_job(team, job, 5, 72, part.data_ptr(), comm.state_address, 1)
            return part
        finally:
            team.close()

    for got in on_ranks(rank):
        assert torch.equal(got, parts[0] + parts[1])


BLOCK_SIZE = 4
WIDTH = {"llama:9q3kv": 72, "mistral": 64}


def steps(width: int) -> list[tuple[torch.Tensor, AttentionBatch, list[int]]]:
    """Hidden states, batch and positions of steps: two prompts, one in two chunks; then single tokens with
    the rest of the second."""
    tables = [torch.arange(10), torch.arange(10, 20)]
    chunks: list[list[tuple[int, int, int]]] = [  # (sequence, from, to)
        [(0, 0, 7), (1, 0, 19)],
        [(0, 7, 8), (1, 19, 31)],
        [(0, 8, 9), (1, 31, 32)],
        [(1, 32, 39)],
    ]
    made = []
    for number, chunk in enumerate(chunks):
        singles = [(s, stop) for s, start, stop in chunk if stop - start == 1]
        group = None
        if singles:
            group = DecodeGroup(
                torch.stack([tables[s] for s, _ in singles]), torch.tensor([n for _, n in singles])
            )
        prefills, slots, positions = [], [], []
        for s, start, stop in chunk:
            at = torch.arange(start, stop)
            if stop - start > 1:
                prefills.append(Prefill(len(positions), len(positions) + len(at), tables[s], stop))
            slots.append(tables[s][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
            positions += at.tolist()
        hidden = torch.randn(len(positions), width, generator=torch.Generator().manual_seed(number))
        made.append((hidden, AttentionBatch(torch.cat(slots), group, prefills), positions))
    return made


def run_steps(stack: Stack, family: str, head_width: int) -> list[torch.Tensor]:
    """What a stack of two layers makes of all steps."""
    angles = torch.rand(64, head_width, generator=torch.Generator().manual_seed(9)) * 6
    found = []
    for hidden, batch, positions in steps(WIDTH[family]):
        tables = angles[positions].cos(), angles[positions].sin()
        found.append(stack.run(hidden, batch, [tables] * 2).clone())
    return found


@pytest.mark.parametrize(
    ("family", "ranks", "threads"), [("llama:9q3kv", 2, 1), ("llama:9q3kv", 2, 2), ("mistral", 3, 1)]
)
def test_two_halves_in_turn_give_the_bits_that_all_rows_together_give(
    family: str, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, single tokens, both; cuts between sequences and in a prompt; full and sliding attention."""
    plan = planned(family, ranks)

    def fused_rank(comm: ShmComm) -> tuple[list[torch.Tensor], list[int]]:
        team = Team(threads)
        try:
            model = zoo_model(family)
            shard(model, plan, comm.rank, comm)
            parts = ready(model, team)
            fused = fuse(parts, comm=comm)
            assert fused.problems == []
            fused.use_pages(
                allocate(parts.context.shapes, 20, BLOCK_SIZE, torch.float32, torch.device("cpu"))
            )
            stack = fused._chains[0].stack
            cuts = [stack._choose_cut(batch, len(hidden)) for hidden, batch, _ in steps(WIDTH[family])]
            return run_steps(stack, family, _rotary_width(fused)), cuts
        finally:
            team.close()

    monkeypatch.setattr(stacks, "_REREADING_ROWS", 10**9)
    together = on_ranks(fused_rank, ranks)
    monkeypatch.setattr(stacks, "_REREADING_ROWS", 1e-9)
    halves = on_ranks(fused_rank, ranks)
    short = on_ranks(fused_rank, ranks, slot_bytes=512)
    for (expected, none), (got, all_cut), (same, fitting) in zip(together, halves, short, strict=True):
        assert none == [0, 0, 0, 0] and 0 not in all_cut
        assert fitting == [0, 0, 1, 0], "only the step of two rows has halves that fit"
        for rows, other, third in zip(expected, got, same, strict=True):
            assert torch.equal(rows, other) and torch.equal(rows, third)


def _rotary_width(fused: FusedLayers) -> int:
    rotary = fused._chains[0].ready[0].draft.attend.rotary
    return 0 if rotary is None else rotary.width


@pytest.mark.parametrize("family", ["phi", "mixtral", "qwen3"])
def test_where_nobody_would_wait_rows_stay_together(family: str) -> None:
    """One sum a layer; parts that the model's own code computes; heads that divide."""
    plan = planned(family, 2)

    def rank(comm: ShmComm) -> float:
        team = Team(1)
        try:
            model = zoo_model(family)
            shard(model, plan, comm.rank, comm)
            return fuse(ready(model, team), comm=comm)._chains[0].stack._saved
        finally:
            team.close()

    assert on_ranks(rank) == [0.0, 0.0]
