"""Ranks as threads: collectives, order, failure."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.local import LocalComm
from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import RankError


def test_all_reduce_is_the_sum_with_the_same_bits_everywhere() -> None:
    def body(comm: SimulatedComm) -> torch.Tensor:
        generator = torch.Generator().manual_seed(comm.rank)
        return comm.all_reduce(torch.randn(5, 3, generator=generator))

    results = run_ranks(3, body)
    expected = sum(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(3))
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(results[0], torch.as_tensor(expected))


def test_all_gather_joins_uneven_parts_and_empty_ones() -> None:
    sizes = (3, 0, 1)

    def body(comm: SimulatedComm) -> torch.Tensor:
        return comm.all_gather(torch.full((2, sizes[comm.rank]), float(comm.rank)), sizes)

    for result in run_ranks(3, body):
        assert result.tolist() == [[0.0, 0.0, 0.0, 2.0]] * 2


def test_all_gather_along_the_first_dimension() -> None:
    results = run_ranks(2, lambda comm: comm.all_gather(torch.full((comm.rank + 1, 2), 1.0), (1, 2), dim=0))
    assert all(result.shape == (3, 2) for result in results)


def test_broadcast_gives_the_sources_values_in_memory_of_ones_own() -> None:
    def body(comm: SimulatedComm) -> torch.Tensor:
        result = comm.broadcast(torch.full((2,), float(comm.rank)), source=1)
        comm.barrier()
        result += comm.rank
        comm.barrier()
        return result

    assert [result.tolist() for result in run_ranks(3, body)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_a_failing_rank_releases_the_others_and_its_error_is_the_one_raised() -> None:
    seen: list[str] = []

    def body(comm: SimulatedComm) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("broken on purpose")
        try:
            comm.barrier()
        except RankError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError, match="broken on purpose"):
        run_ranks(3, body, timeout_s=30)
    assert len(seen) == 2
    assert all("rank 1" in message for message in seen)


def test_a_rank_that_does_not_come_is_noticed_at_the_deadline() -> None:
    def body(comm: SimulatedComm) -> None:
        if comm.rank == 0:
            comm.barrier()

    with pytest.raises(RankError, match=r"0\.2 s"):
        run_ranks(2, body, timeout_s=0.2)


def test_different_collectives_at_once_are_an_error() -> None:
    def body(comm: SimulatedComm) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.zeros(2))
        else:
            comm.barrier()

    with pytest.raises(RankError, match="collectives differ"):
        run_ranks(2, body, timeout_s=30)


def test_a_wrong_size_in_all_gather_is_an_error() -> None:
    with pytest.raises(RankError, match="promised"):
        run_ranks(2, lambda comm: comm.all_gather(torch.zeros(2), (2, 1)), timeout_s=30)


def test_a_closed_end_refuses() -> None:
    def body(comm: SimulatedComm) -> None:
        comm.close()
        comm.barrier()

    with pytest.raises(RankError, match=r"after close"):
        run_ranks(1, body)


def test_a_group_of_one_hands_everything_back() -> None:
    comm = LocalComm()
    tensor = torch.randn(3)
    assert (comm.rank, comm.size) == (0, 1)
    assert torch.equal(comm.all_reduce(tensor), tensor)
    assert torch.equal(comm.all_gather(tensor, (3,)), tensor)
    assert torch.equal(comm.broadcast(tensor), tensor)
    comm.barrier()
    comm.close()
