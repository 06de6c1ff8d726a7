"""Collectives over shared memory give what torch gives, with the same bits on every rank, and end in time.

Ranks are threads here, each with its own end of one segment: kernels run without the GIL.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psutil
import pytest
import torch

from shoal.comm import shm_kernels
from shoal.comm.shm import ShmComm, segment_bytes
from shoal.comm.shm_segment import Segment
from shoal.comm.shm_sums import FLOAT32
from shoal.errors import RankError

Result = TypeVar("Result")

SLOT_BYTES = 160 * 1024  # above what is summed directly, so that every way is taken; not a power of two


def make(size: int, timeout_s: float = 60.0, slot_bytes: int = SLOT_BYTES) -> list[ShmComm]:
    segment = Segment.create(segment_bytes(size, slot_bytes))
    segment.hide()
    processes = [os.getpid()] * size
    return [ShmComm(rank, segment, processes, timeout_s, False, slot_bytes) for rank in range(size)]


def on_ranks(comms: list[ShmComm], function: Callable[[ShmComm], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(comms)) as pool:
        return [future.result() for future in [pool.submit(function, comm) for comm in comms]]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 50).to(dtype)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    dtype = parts[0].dtype
    wide = [part.float() if dtype in (torch.bfloat16, torch.float16) else part for part in parts]
    total = wide[0]
    for part in wide[1:]:
        total = total + part
    return total.to(dtype)


@pytest.fixture(params=[2, 3, 8])
def comms(request: pytest.FixtureRequest) -> list[ShmComm]:
    return make(request.param)


# In fp32: one element, a row, just below and above the direct way, several pieces with a rest.
@pytest.mark.parametrize("count", [0, 1, 577, 16384, 16385, 40960, 100_003])
def test_sums_have_the_same_bits_on_every_rank_whatever_their_size(comms: list[ShmComm], count: int) -> None:
    parts = [values(comm.rank, count) for comm in comms]
    expected = sum_in_order(parts)
    for _ in range(3):
        for out in on_ranks(comms, lambda comm: comm.all_reduce(parts[comm.rank].clone())):
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("count", [5, 90_001])
def test_other_dtypes_are_summed_too(dtype: torch.dtype, count: int) -> None:
    comms = make(3)
    parts = [values(comm.rank, count).clamp(-40, 40).to(dtype) for comm in comms]
    for out in on_ranks(comms, lambda comm: comm.all_reduce(parts[comm.rank].clone())):
        assert torch.equal(out, sum_in_order(parts))


def test_a_view_that_is_not_contiguous_is_summed_and_keeps_its_shape(comms: list[ShmComm]) -> None:
    parts = [values(comm.rank, 6, 10).t()[::2] for comm in comms]
    for out in on_ranks(comms, lambda comm: comm.all_reduce(parts[comm.rank])):
        assert torch.equal(out, sum_in_order(parts))


def test_a_contiguous_tensor_is_summed_in_place(comms: list[ShmComm]) -> None:
    for is_same in on_ranks(comms, lambda comm: (lambda x: comm.all_reduce(x) is x)(torch.ones(3))):
        assert is_same


@pytest.mark.parametrize("dim", [-1, 0, 1, -3])
@pytest.mark.parametrize("kind", ["even", "uneven", "one empty", "all empty", "only the last"])
def test_shards_of_any_size_are_put_side_by_side(comms: list[ShmComm], kind: str, dim: int) -> None:
    size = len(comms)
    sizes = {
        "even": [2] * size,
        "uneven": [rank % 3 + 1 for rank in range(size)],
        "one empty": [0] + [2] * (size - 1),
        "all empty": [0] * size,
        "only the last": [0] * (size - 1) + [3],
    }[kind]
    shards = []
    for rank, length in enumerate(sizes):
        shape = [3, 4, 5]
        shape[dim] = length
        shards.append(values(rank, *shape))
    for out in on_ranks(comms, lambda comm: comm.all_gather(shards[comm.rank], sizes, dim)):
        assert torch.equal(out, torch.cat(shards, dim))
        assert out.is_contiguous(), "model code views it as it likes"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_large_shards_of_any_dtype_go_in_pieces(comms: list[ShmComm], dtype: torch.dtype) -> None:
    """Rows of more bytes than a slot, and blocks whose pieces end in the middle of a row."""
    widths = [100_001 + 70_000 * (rank % 2) for rank in range(len(comms))]
    shards = [(values(comm.rank, 3, widths[comm.rank]) > 0).to(dtype) for comm in comms]
    for out in on_ranks(comms, lambda comm: comm.all_gather(shards[comm.rank], widths)):
        assert torch.equal(out, torch.cat(shards, -1))


def test_a_shard_that_is_not_contiguous_is_gathered(comms: list[ShmComm]) -> None:
    shards = [values(comm.rank, 4, 6).t() for comm in comms]
    for out in on_ranks(comms, lambda comm: comm.all_gather(shards[comm.rank], [4] * len(comms))):
        assert torch.equal(out, torch.cat(shards, -1))


def test_a_shard_of_another_size_than_promised_is_refused_and_the_group_goes_on(
    comms: list[ShmComm],
) -> None:
    def ask(comm: ShmComm) -> str:
        with pytest.raises(RankError) as caught:
            comm.all_gather(torch.ones(3), [2] * comm.size)
        return str(caught.value)

    promised = [2] * len(comms)
    for rank, told in enumerate(on_ranks(comms, ask)):
        assert told == f"all_gather: rank {rank} brings 3 along dimension -1, promised were {promised}"
    on_ranks(comms, lambda comm: comm.barrier())


@pytest.mark.parametrize("count", [1, 1001, 300_000])
def test_broadcast_gives_the_sources_values_in_any_dtype(comms: list[ShmComm], count: int) -> None:
    for source in (0, len(comms) - 1):
        for dtype in (torch.int64, torch.uint8, torch.bool):
            sent = (values(source, count) > 0).to(dtype)

            def take(comm: ShmComm, sent: torch.Tensor = sent, source: int = source) -> torch.Tensor:
                return comm.broadcast(sent if comm.rank == source else torch.zeros_like(sent), source)

            for out in on_ranks(comms, take):
                assert torch.equal(out, sent)


def test_a_barrier_opens_when_the_last_has_come(comms: list[ShmComm]) -> None:
    last = len(comms) - 1
    come = threading.Event()

    def cross(comm: ShmComm) -> bool:
        if comm.rank == last:
            come.set()
        comm.barrier()
        return come.is_set()

    assert all(on_ranks(comms, cross))


def test_a_thousand_collectives_of_all_kinds_in_a_row_stay_right() -> None:
    comms = make(3)

    def work(comm: ShmComm) -> list[float]:
        seen = []
        for turn in range(250):
            seen.append(comm.all_reduce(torch.full((turn % 7 + 1,), float(comm.rank + turn)))[0].item())
            seen.append(comm.broadcast(torch.tensor([comm.rank + turn]), turn % 3).item())
            seen.append(comm.all_gather(torch.tensor([comm.rank * turn]), [1] * 3).sum().item())
            comm.barrier()
        return seen

    expected = [
        number
        for turn in range(250)
        for number in (3.0 * turn + 3, turn % 3 + turn, 3 * turn)
    ]  # fmt: skip
    assert on_ranks(comms, work) == [expected] * 3


def test_a_peer_that_does_not_come_is_an_error_at_the_deadline_and_names_it() -> None:
    comms = make(3)
    comms[0].set_timeout(0.3)

    def wait(comm: ShmComm) -> tuple[str, int | None]:
        with pytest.raises(RankError) as caught:
            comm.all_reduce(torch.ones(2))
        return str(caught.value), caught.value.rank

    started = time.monotonic()
    late, released = on_ranks(comms[:2], wait)
    assert 0.3 <= time.monotonic() - started < 30
    assert late == ("all_reduce: rank 2 did not come within 0.3 s", 2)
    assert released == ("all_reduce: rank 2 has left the group, or failed", 2)
    with pytest.raises(RankError, match="of no more use: all_reduce: rank 2 did not come"):
        comms[0].barrier()
    with pytest.raises(RankError, match="rank 2 has left the group, or failed"):
        comms[2].barrier()


def test_a_peer_that_leaves_releases_those_who_wait() -> None:
    comms = make(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(comms[0].barrier)
        comms[1].close()
        with pytest.raises(RankError, match="barrier: rank 1 has left the group, or failed") as caught:
            waiting.result(60)
    assert caught.value.rank == 1
    with pytest.raises(RankError, match="the group of ranks is closed"):
        comms[1].barrier()
    comms[1].close()


def test_what_a_leaving_peer_has_done_before_still_counts() -> None:
    for _ in range(50):
        comms = make(2)

        def reduce_and_leave(comm: ShmComm) -> float:
            out = comm.all_reduce(torch.ones(1)).item()
            comm.close()
            return out

        assert on_ranks(comms, reduce_and_leave) == [2.0, 2.0]


def test_a_group_can_be_closed_while_another_thread_waits_in_it() -> None:
    comms = make(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(comms[0].barrier)
        comms[0].close()
        with pytest.raises(RankError):
            waiting.result(60)


def test_ranks_in_different_collectives_are_told_so() -> None:
    comms = make(2)

    def differ(comm: ShmComm) -> str:
        with pytest.raises(RankError) as caught:
            comm.barrier() if comm.rank else comm.all_reduce(torch.ones(4))
        return str(caught.value)

    told = on_ranks(comms, differ)
    assert any("is in another collective, or brings another size" in text for text in told)


def test_ranks_that_bring_different_sizes_are_told_so() -> None:
    comms = make(2)

    def differ(comm: ShmComm) -> str:
        with pytest.raises(RankError) as caught:
            comm.all_reduce(torch.ones(4 + comm.rank))
        return str(caught.value)

    assert any("brings another size" in text for text in on_ranks(comms, differ))


def post(comm: ShmComm, channel: int, part: torch.Tensor) -> None:
    status = shm_kernels.post(comm.state_address, channel, part.data_ptr(), part.numel(), FLOAT32)
    comm.check(status, "all_reduce")


def collect(comm: ShmComm, channel: int, target: torch.Tensor) -> None:
    status = shm_kernels.collect(comm.state_address, channel, target.data_ptr(), target.numel(), FLOAT32)
    comm.check(status, "all_reduce")


def test_a_sum_on_each_channel_can_be_under_way_while_ranks_are_at_different_places(
    comms: list[ShmComm],
) -> None:
    """As fused layers do it: collect a half's sum, post its next, then the same for the other half."""
    sizes, turns = (1000, SLOT_BYTES // 4), 40
    parts = [[values(comm.rank + 10 * channel, sizes[channel]) for channel in (0, 1)] for comm in comms]

    def work(comm: ShmComm) -> list[torch.Tensor]:
        own = [part.clone() for part in parts[comm.rank]]
        for channel in (0, 1):
            post(comm, channel, own[channel])
        for turn in range(turns):
            if turn % len(comms) == comm.rank:
                threading.Event().wait(0.001)  # each is late now and then
            for channel in (0, 1):
                collect(comm, channel, own[channel])
                own[channel] /= len(comms)
                if turn + 1 < turns:
                    post(comm, channel, own[channel])
        comm.barrier()
        return own

    expected = [sum_in_order([own[channel] for own in parts]) / len(comms) for channel in (0, 1)]
    for _ in range(turns - 1):
        expected = [sum_in_order([total] * len(comms)) / len(comms) for total in expected]
    for out in on_ranks(comms, work):
        assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])


def test_a_peer_that_has_posted_and_is_gone_is_missed_at_its_next_post_only() -> None:
    comms = make(2)
    have_posted = threading.Barrier(2)

    def work(comm: ShmComm) -> float:
        own = torch.full((3,), 1.0 + comm.rank)
        post(comm, 1, own)
        have_posted.wait(60)  # who posts once the other is gone is told so at once
        if comm.rank == 1:
            comm.close()
            return 3.0
        collect(comm, 1, own)
        with pytest.raises(RankError, match="rank 1 has left the group") as caught:
            comms[0].barrier()
        assert caught.value.rank == 1
        return own[0].item()

    assert on_ranks(comms, work) == [3.0, 3.0]


def test_a_peer_that_leaves_between_posts_releases_who_collects() -> None:
    comms = make(2)
    post(comms[0], 1, torch.ones(3))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collect, comms[0], 1, torch.ones(3))
        comms[1].close()
        with pytest.raises(RankError, match="all_reduce: rank 1 has left the group, or failed"):
            waiting.result(60)


def test_the_deadline_is_that_of_collecting() -> None:
    comms = make(2, timeout_s=0.2)
    post(comms[0], 0, torch.ones(3))
    started = time.monotonic()
    with pytest.raises(RankError, match=r"all_reduce: rank 1 did not come within 0\.2 s"):
        collect(comms[0], 0, torch.ones(3))
    assert 0.2 <= time.monotonic() - started < 30


def test_posts_of_different_sizes_are_told_so() -> None:
    comms = make(2)

    def differ(comm: ShmComm) -> str:
        own = torch.ones(4 + comm.rank)
        with pytest.raises(RankError) as caught:
            post(comm, 1, own)
            collect(comm, 1, own)
        return str(caught.value)

    assert any("brings another size" in text for text in on_ranks(comms, differ))


def test_files_that_watch_the_peers_are_closed_with_the_group() -> None:
    process = psutil.Process()
    gc.collect()
    before = process.num_fds()
    comms = make(3)
    del comms
    gc.collect()
    assert process.num_fds() == before
