"""Collectives between real processes give what they promise, and a missing peer is an error in time.

One group of processes per size; each test sends all of them the name of a function of this file to run.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from shoal.comm.torch_dist import TorchComm, connect, open_store, use_loopback
from shoal.errors import RankError

TIMEOUT_S = 20.0


def all_reduce(comm: TorchComm, dtype: str, _: Any) -> Any:
    out = comm.all_reduce(torch.arange(6, dtype=getattr(torch, dtype)).reshape(2, 3) * (comm.rank + 1))
    strided = comm.all_reduce(torch.ones(3, 2).t()[:, ::2])
    return out, strided


def all_gather(comm: TorchComm, sizes: list[int], dim: int) -> Any:
    shape = [2, 2, 2]
    shape[dim] = sizes[comm.rank]
    out = comm.all_gather(torch.full(shape, float(comm.rank + 1)), sizes, dim)
    return out, out.is_contiguous()


def broken_promise(comm: TorchComm, *_: Any) -> Any:
    """Everyone brings one element too many, so nobody enters the collective."""
    try:
        comm.all_gather(torch.ones(3), [2] * comm.size)
    except RankError as error:
        return str(error)


def broadcast(comm: TorchComm, source: int, _: Any) -> Any:
    return comm.broadcast(torch.full((3,), comm.rank), source)


def barrier(comm: TorchComm, slowest: int, delay_s: float) -> Any:
    if comm.rank == slowest:
        time.sleep(delay_s)  # what the others have to wait for
    entered = time.monotonic()
    comm.barrier()
    return entered, time.monotonic()


def missing(comm: TorchComm, absent: int, timeout_s: float) -> Any:
    """Everyone but ``absent`` enters a collective."""
    comm.set_timeout(timeout_s)
    started = time.monotonic()
    try:
        if comm.rank != absent:
            comm.all_reduce(torch.ones(2))
    except RankError as error:
        return str(error), time.monotonic() - started


class Group:
    """Processes of one group, each running what it is told."""

    def __init__(self, size: int) -> None:
        self._store, rendezvous = open_store()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        use_loopback(environment)
        self._members = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(size), rendezvous],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(size)
        ]

    def run(self, function: Any, *arguments: Any) -> list[Any]:
        """What each rank's call returned."""
        for member in self._members:
            assert member.stdin is not None
            pickle.dump((function.__name__, arguments), member.stdin)
            member.stdin.flush()
        return [pickle.load(member.stdout) for member in self._members]  # type: ignore[arg-type]

    def close(self) -> None:
        for member in self._members:
            assert member.stdin is not None and member.stdout is not None
            member.stdin.close()
            assert member.wait(20) == 0
            member.stdout.close()


@pytest.fixture(scope="module", params=[2, 3])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def group(size: int) -> Iterator[Group]:
    made = Group(size)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64"])
def test_all_reduce_sums_and_is_the_same_everywhere(group: Group, size: int, dtype: str) -> None:
    factor = size * (size + 1) // 2
    for out, strided in group.run(all_reduce, dtype, None):
        assert torch.equal(out, torch.arange(6, dtype=getattr(torch, dtype)).reshape(2, 3) * factor)
        assert torch.equal(strided, torch.full((2, 2), float(size)))


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("kind", ["even", "uneven", "one empty", "all empty"])
def test_all_gather_concatenates_shards_of_any_size(group: Group, size: int, kind: str, dim: int) -> None:
    sizes = {
        "even": [2] * size,
        "uneven": [3, 1, 2][:size],
        "one empty": [0, 2, 1][:size],
        "all empty": [0] * size,
    }[kind]
    shards = []
    for rank, length in enumerate(sizes):
        shape = [2, 2, 2]
        shape[dim] = length
        shards.append(torch.full(shape, float(rank + 1)))
    for out, is_contiguous in group.run(all_gather, sizes, dim):
        assert torch.equal(out, torch.cat(shards, dim))
        assert is_contiguous, "model code views it as it likes"


def test_a_shard_of_another_size_than_promised_is_refused(group: Group, size: int) -> None:
    for rank, message in enumerate(group.run(broken_promise)):
        assert message == f"all_gather: rank {rank} brings 3 along dimension -1, promised were {[2] * size}"


def test_broadcast_gives_the_sources_values(group: Group, size: int) -> None:
    for source in range(size):
        for out in group.run(broadcast, source, None):
            assert out.tolist() == [source] * 3


def test_a_barrier_opens_when_the_last_has_come(group: Group, size: int) -> None:
    times = group.run(barrier, size - 1, 0.2)
    assert min(left for _, left in times) >= max(entered for entered, _ in times)


def test_a_peer_that_does_not_come_is_an_error_within_the_deadline(group: Group, size: int) -> None:
    """Last of all: a group is of no use afterwards."""
    answers = group.run(missing, size - 1, 0.5)
    assert answers.pop() is None
    for message, seconds in answers:
        assert message.startswith("all_reduce:")
        assert seconds < 2


def test_the_store_listens_on_loopback_only() -> None:
    process = psutil.Process()
    before = {c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    store, address = open_store()
    after = {c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    assert [f"{place.ip}:{place.port}" for place in after - before] == [address]
    assert address.startswith("127.0.0.1:")
    del store


def test_peers_that_never_join_are_an_error_within_the_deadline() -> None:
    store, rendezvous = open_store()
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 0 could not join its group"):
        connect(0, 2, rendezvous, torch.device("cpu"), 0.5)
    assert time.monotonic() - started < 5
    del store


def serve(rank: int, size: int, rendezvous: str) -> None:
    """A member's side: functions of this file by name, until stdin closes."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints must not mix with the answers
    torch.set_num_threads(1)
    comm = connect(rank, size, rendezvous, torch.device("cpu"), TIMEOUT_S)
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        pickle.dump(globals()[name](comm, *arguments), out)
        out.flush()
    comm.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
