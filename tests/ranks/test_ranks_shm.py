"""Shared memory between real processes: the sums of gloo, the same bits everywhere, and a peer that is
killed or stopped is an error in time that leaves nothing behind.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shoal.comm.base import Comm
from shoal.comm.choose import join_private_group, share_memory
from shoal.comm.meeting import exchange_over
from shoal.comm.shm import ShmComm
from shoal.comm.torch_dist import open_store
from shoal.errors import RankError
from support.rank_pool import RankPool

START_TIMEOUT_S = 120.0
SHAPES = [(1,), (3, 577), (40_000,), (130_001,), (5, 0)]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 20).to(dtype)


def compare_with_gloo(gloo: Comm, dtype: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(shared memory's, gloo's) result of every collective on tensors of several sizes."""
    shared = share_memory(gloo.rank, gloo.size, exchange_over(gloo), 60)
    assert isinstance(shared, ShmComm)
    results = []
    for shape in SHAPES:
        mine = values(gloo.rank, shape, getattr(torch, dtype))
        sizes = [shape[-1] if rank % 2 else 2 * shape[-1] + 1 for rank in range(gloo.size)]
        shard = values(gloo.rank, (*shape[:-1], sizes[gloo.rank]), mine.dtype)
        results.append((shared.all_reduce(mine.clone()), gloo.all_reduce(mine.clone())))
        results.append((shared.all_gather(shard, sizes), gloo.all_gather(shard, sizes)))
        results.append((shared.broadcast(mine.clone(), 1), gloo.broadcast(mine.clone(), 1)))
        shared.barrier()
    shared.close()
    return results


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64"])
def test_results_are_gloos_and_the_same_bits_on_every_rank(
    rank_pool: RankPool, ranks: int, dtype: str
) -> None:
    answers = rank_pool.run(compare_with_gloo, dtype, ranks=ranks)
    tolerance = {"float32": 1e-5, "float64": 1e-14, "bfloat16": 0.05, "int64": 0.0}[dtype]
    for number, (shared, gloo) in enumerate(answers[0]):
        scale = gloo.abs().max().item() if gloo.numel() else 0.0
        # Only sums may differ, in their last bits: gloo adds in another order, and rounds bfloat16 between.
        torch.testing.assert_close(shared, gloo, rtol=0, atol=tolerance * scale if number % 3 == 0 else 0.0)
        for other in answers[1:]:
            assert torch.equal(other[number][0], shared)


class Group:
    """Processes of one group, each running what it is told."""

    def __init__(self, size: int) -> None:
        self._store, rendezvous = open_store()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.members = [
            subprocess.Popen(
                [sys.executable, "-W", "error", __file__, str(rank), str(size), rendezvous],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
            for rank in range(size)
        ]

    def tell(self, ranks: range, function: Any, *arguments: Any) -> None:
        for rank in ranks:
            stream = self.members[rank].stdin
            assert stream is not None
            pickle.dump((function.__name__, arguments), stream)
            stream.flush()

    def answers(self, ranks: range) -> list[Any]:
        return [pickle.load(self.members[rank].stdout) for rank in ranks]  # type: ignore[arg-type]

    def end(self) -> list[str]:
        """What each has written to stderr, once all have ended in order (or had been killed)."""
        written = []
        for member in self.members:
            _, err = member.communicate(timeout=60)
            assert member.returncode in (0, -signal.SIGKILL), err
            written.append(err.decode())
        return written

    def kill(self) -> None:
        for member in self.members:
            member.kill()
            member.communicate()


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group(3)
    try:
        made.answers(range(3))  # all have met
        yield made
    finally:
        made.kill()


def reduce_for_ever(comm: Comm) -> Any:
    """Sums until a peer fails; (what is said, which rank, when)."""
    assert isinstance(comm, ShmComm)
    try:
        while True:
            comm.all_reduce(torch.ones(5000))
    except RankError as error:
        return str(error), error.rank, time.monotonic()


def reduce_within(comm: Comm, timeout_s: float) -> Any:
    assert isinstance(comm, ShmComm)
    comm.set_timeout(timeout_s)
    return reduce_for_ever(comm)


def reduce_once(comm: Comm) -> Any:
    return comm.all_reduce(torch.ones(1)).item()


def mapped(comm: Comm) -> Any:
    """Files this process has open or mapped under a name that others could find."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return maps + [name for name in files if "shoal" in name and "memfd" not in name]


def test_a_killed_peer_is_named_long_before_the_deadline_and_nothing_is_left(group: Group) -> None:
    names = set(Path("/dev/shm").glob("*"))
    group.tell(range(3), reduce_for_ever)
    psutil.Process(group.members[1].pid).kill()
    killed_at = time.monotonic()
    for said, rank, when in group.answers(range(0, 3, 2)):
        assert "rank 1 has died" in said or "rank 1 has left the group, or failed" in said
        assert rank == 1
        assert when - killed_at < 10, "the deadline is 60 s"
    assert group.end()[0] == ""
    assert set(Path("/dev/shm").glob("*")) <= names


def test_a_stopped_peer_is_an_error_at_the_deadline_and_goes_on_to_an_error_of_its_own(group: Group) -> None:
    group.tell(range(1, 3), reduce_for_ever)
    process = psutil.Process(group.members[1].pid)
    process.suspend()
    started = time.monotonic()
    group.tell(range(0, 1), reduce_within, 0.5)
    answers = group.answers(range(0, 3, 2))
    assert time.monotonic() - started < 30
    assert {rank for _, rank, _ in answers} <= {1, 2}
    assert any("did not come within 0.5 s" in said for said, _, _ in answers)
    process.resume()
    ((said, _, _),) = group.answers(range(1, 2))
    assert "has left the group, or failed" in said
    assert group.end() == ["", "", ""]


def test_no_name_is_left_and_no_warning_is_printed(group: Group) -> None:
    group.tell(range(3), reduce_once)
    assert group.answers(range(3)) == [3.0] * 3
    group.tell(range(3), mapped)
    assert group.answers(range(3)) == [[]] * 3
    assert group.end() == ["", "", ""]


def serve(rank: int, size: int, rendezvous: str) -> None:
    """A member's side: functions of this file by name, until stdin closes."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints must not mix with the answers
    torch.set_num_threads(1)
    comm = join_private_group(rank, size, rendezvous, torch.device("cpu"), START_TIMEOUT_S, "shm")
    comm.set_timeout(60)  # type: ignore[attr-defined]
    answer: Any = "joined"
    while True:
        pickle.dump(answer, out)
        out.flush()
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        answer = globals()[name](comm, *arguments)
    out.close()
    comm.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
