"""Starts the ranks of a model from a program that runs once, and hands each its part. Knows no call."""

from __future__ import annotations

import logging
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from shoal.comm.base import Comm
from shoal.comm.choose import join_private_group
from shoal.comm.torch_dist import open_store
from shoal.device.base import threads_per_rank
from shoal.device.peak import trim_heap
from shoal.errors import UsageError
from shoal.parallel.build import build_part
from shoal.parallel.crew import Crew
from shoal.parallel.entry import Calls, adopt, hook_keys
from shoal.parallel.guard import guard
from shoal.parallel.leader import Leader
from shoal.parallel.packing import pack
from shoal.parallel.request import MARK, Request
from shoal.parallel.subject import Subject, make_plan
from shoal.parallel.transfer import cast_and_move, pack_skeleton, parcels, send_slices
from shoal.parallel.words import Begin, Ready
from shoal.plan.types import Plan
from shoal.shard import shard

__all__ = ["start_group"]

_log = logging.getLogger("shoal.parallel")


def start_group(subject: Subject, request: Request, policy: Any, timeout_s: float) -> PreTrainedModel:
    """This process becomes rank 0, and starts the others.

    Returns:
        the model: the one in memory, of which only this rank's part is left, or one that was loaded.

    Raises:
        RankError: a rank could not be started, or failed.
    """
    crew = Crew(request.tp)  # first: it takes them seconds to import what they need
    comm: Comm | None = None
    try:
        plan = make_plan(subject, request.tp, policy)
        comm = _connect(crew, request, plan, timeout_s)
        calls = Calls()
        if subject.recipe is not None:
            crew.tell(pack(subject.recipe, request.device.torch_device), timeout_s)
            model = build_part(subject.recipe, plan, comm, request.device, calls)
        else:
            model = _hand_out(subject, request, plan, crew, comm, calls, timeout_s)
        crew.expect(Ready, timeout_s)
    except BaseException:
        crew.stop(0)
        if comm is not None:
            comm.close()
        raise
    trim_heap()
    leader = Leader(model, crew, comm, request.device, timeout_s, _share_cores(request))
    calls.group = leader
    vars(model)[MARK] = leader
    guard(model)
    weakref.finalize(model, leader.close)
    return model


def _connect(crew: Crew, request: Request, plan: Plan, timeout_s: float) -> Comm:
    """Introduce the ranks to each other."""
    store, rendezvous = open_store()
    for rank in range(1, request.tp):
        begin = Begin(
            rank=rank,
            size=request.tp,
            rendezvous=rendezvous,
            device=request.device.for_rank(rank).name,
            num_threads=threads_per_rank(request.tp),
            timeout_s=timeout_s,
            sys_path=tuple(sys.path),
            plan=plan.to_dict(),
            comm=request.comm,
        )
        crew.tell(pickle.dumps(begin), timeout_s, [rank])
    crew.expect(Ready, timeout_s)
    request.device.activate()
    return join_private_group(0, request.tp, store, request.device.torch_device, timeout_s, request.comm)


def _hand_out(
    subject: Subject,
    request: Request,
    plan: Plan,
    crew: Crew,
    comm: Comm,
    calls: Calls,
    timeout_s: float,
) -> PreTrainedModel:
    """Give every member its slices of the model in memory, then let all but rank 0's go."""
    model = subject.model
    assert model is not None
    model.eval()
    device = request.device.torch_device
    contents = parcels(model, request.dtype)
    places = [(parcel.names, parcel.dtype) for parcel in contents]
    try:
        skeleton = pack_skeleton(model, contents, device)
    except Exception as error:  # pickling runs the model's own code
        raise UsageError(
            f"model: it cannot be sent to other processes ({type(error).__name__}: {error}); run the program "
            "under torchrun, where every rank makes its own",
            field="model",
        ) from error
    crew.tell(pack(places, device), timeout_s)
    crew.tell(skeleton, timeout_s)
    crew.expect(Ready, timeout_s)
    for rank, frames in crew.frames.items():
        with crew.talking_to(rank):
            send_slices(frames, model, contents, plan, rank)
    del contents
    hooks = hook_keys(model)
    shard(model, plan, 0, comm)
    adopt(model, plan, calls, hooks)
    cast_and_move(model, places, device)
    return model


def _share_cores(request: Request) -> Callable[[], None]:
    """Ranks on a CPU share its cores: this process takes its share, until the function returned is called."""
    usual, share = torch.get_num_threads(), threads_per_rank(request.tp)
    if request.device.kind != "cpu" or usual <= share:
        return lambda: None
    _log.info("%d ranks share the CPU: torch uses %d threads here in place of %d", request.tp, share, usual)
    torch.set_num_threads(share)

    def restore() -> None:
        if torch.get_num_threads() == share:
            torch.set_num_threads(usual)

    return restore
