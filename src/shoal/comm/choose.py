"""Which transport a group of ranks uses: shared memory between processes of one host that compute on the
CPU, torch's own (gloo, NCCL) otherwise. Says which, and why. Knows no model.
"""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.comm.base import Comm
from shoal.comm.meeting import Exchange, exchange_over, exchange_through
from shoal.comm.private import connect_private
from shoal.comm.shm_segment import Segment, host_identity
from shoal.comm.torch_dist import connect
from shoal.errors import RankError

if TYPE_CHECKING:
    from shoal.comm.shm import ShmComm

__all__ = ["Transport", "join_group", "join_private_group", "share_memory"]

Transport = Literal["auto", "shm", "gloo"]

_log = logging.getLogger("shoal.comm")


def join_group(
    rank: int,
    size: int,
    rendezvous: str,
    device: torch.device,
    timeout_s: float,
    wanted: Transport = "auto",
    generation: int = 0,
) -> Comm:
    """Join the group of ranks that are processes of ours, or torchrun's.

    Args:
        rendezvous: ``host:port`` of a store, or empty for the ranks that torchrun started.
        timeout_s: how long the others may take to come, and later a collective waits for them.
        wanted: "shm" fails where "auto" would use gloo. On devices other than CPUs it is of no account.

    Raises:
        RankError: the peers did not come, or shared memory was wanted and is not to be had.
    """
    if device.type != "cpu" or wanted == "gloo":
        return connect(rank, size, rendezvous, device, timeout_s)
    if rendezvous:
        exchange = exchange_through(rendezvous, rank, size, timeout_s, generation)
        shared = share_memory(rank, size, exchange, timeout_s, wanted)
        return shared or connect(rank, size, rendezvous, device, timeout_s)
    group = connect(rank, size, rendezvous, device, timeout_s)
    shared = share_memory(group.rank, group.size, exchange_over(group), timeout_s, wanted)
    if shared is None:
        return group
    group.close()
    return shared


def join_private_group(
    rank: int,
    size: int,
    meeting: TCPStore | str,
    device: torch.device,
    timeout_s: float,
    wanted: Transport = "auto",
) -> Comm:
    """The same beside whatever groups the program has, without any of torch's default group."""
    if device.type == "cpu" and wanted != "gloo":
        shared = share_memory(rank, size, exchange_through(meeting, rank, size, timeout_s), timeout_s, wanted)
        if shared is not None:
            return shared
    return connect_private(rank, size, meeting, device, timeout_s)


def share_memory(
    rank: int, size: int, exchange: Exchange, timeout_s: float, wanted: Transport = "auto"
) -> ShmComm | None:
    """A group over shared memory if every rank can; None on every rank if one cannot.

    Raises:
        RankError: a rank did not come; or it cannot be, and was ``wanted``.
    """
    segment, problem = _prepare(rank, size)
    mine = {
        "host": host_identity(),
        "process": os.getpid(),
        "cores": sorted(_cores()),
        "path": "" if segment is None else segment.path,
        "problem": problem,
    }
    told = [json.loads(words) for words in exchange(json.dumps(mine))]
    problem = _first_problem(told)
    comm: ShmComm | None = None
    if not problem:
        comm, problem = _attach(rank, told, segment, timeout_s)
        answers = enumerate(exchange(problem or "ok"))
        problem = next((f"rank {peer}: {said}" for peer, said in answers if said != "ok"), "")
    if segment is not None:
        segment.hide()  # everybody has it, or nobody wants it
    if problem and wanted == "shm":
        raise RankError(f"no memory to share between the ranks: {problem}", rank)
    if comm is not None and not problem:
        comm.barrier()  # until everybody has read the last words: the store they came through may go now
    if rank == 0:
        chosen = f"gloo ({problem})" if problem else "shared memory"
        _log.info("%d ranks sum over %s", size, chosen)
    return None if problem else comm


def _prepare(rank: int, size: int) -> tuple[Segment | None, str]:
    """Rank 0's memory; or why there can be none, as far as this rank knows."""
    try:
        from shoal.comm.shm import MOST_RANKS, compile_kernels, segment_bytes
    except ImportError as error:
        return None, str(error)
    if size > MOST_RANKS:
        return None, f"{size} ranks are more than {MOST_RANKS}"
    compile_kernels()
    if rank != 0:
        return None, ""
    try:
        return Segment.create(segment_bytes(size)), ""
    except OSError as error:
        return None, str(error)


def _first_problem(told: list[dict[str, Any]]) -> str:
    for rank, words in enumerate(told):
        if words["problem"]:
            return f"rank {rank}: {words['problem']}"
        if words["host"] != told[0]["host"]:
            return f"rank {rank} is on another host than rank 0, or another user's"
    return ""


def _attach(
    rank: int, told: list[dict[str, Any]], segment: Segment | None, timeout_s: float
) -> tuple[ShmComm | None, str]:
    from shoal.comm.shm import ShmComm, segment_bytes

    cores = set().union(*(words["cores"] for words in told))
    try:
        if segment is None:
            segment = Segment.attach(told[0]["path"], segment_bytes(len(told)))
        processes = [words["process"] for words in told]
        return ShmComm(rank, segment, processes, timeout_s, len(cores) >= len(told)), ""
    except OSError as error:
        return None, str(error)


def _cores() -> set[int]:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
