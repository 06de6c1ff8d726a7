"""Joins the ranks that torchrun started into a model's group: each keeps its part of the model it has made or
reads. Knows no call.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import torch
from transformers import PreTrainedModel

import shoal.errors
from shoal.comm.base import Comm
from shoal.comm.choose import join_group as join_ranks
from shoal.errors import PlanError, ShoalError, UsageError
from shoal.parallel.agree import digest, share_bytes, weights_digest, which_differ
from shoal.parallel.build import build_part
from shoal.parallel.entry import Calls, adopt, hook_keys
from shoal.parallel.guard import guard
from shoal.parallel.lockstep import Lockstep
from shoal.parallel.request import MARK, Request
from shoal.parallel.subject import Subject, make_plan
from shoal.parallel.transfer import cast_and_move, parcels
from shoal.plan.types import Plan
from shoal.shard import shard

__all__ = ["join_group"]


def join_group(subject: Subject, request: Request, policy: Any, timeout_s: float) -> PreTrainedModel:
    """Keep this rank's part of the model. Called by every rank; rank 0's plan is everybody's.

    Raises:
        UsageError: the ranks' models differ.
        RankError: a rank did not come.
    """
    control = join_ranks(0, 0, "", torch.device("cpu"), timeout_s, request.comm)
    _check_same(subject, control)
    plan, number = _shared_plan(subject, request.tp, policy, control)
    device = request.device
    device.activate()
    comm = control if device.kind == "cpu" else join_ranks(0, 0, "", device.torch_device, timeout_s)
    calls = Calls()
    if subject.recipe is not None:
        model = build_part(subject.recipe, plan, comm, device, calls)
    else:
        assert subject.model is not None
        model = subject.model.eval()
        places = [(parcel.names, parcel.dtype) for parcel in parcels(model, request.dtype)]
        hooks = hook_keys(model)
        shard(model, plan, comm.rank, comm)
        adopt(model, plan, calls, hooks)
        cast_and_move(model, places, device.torch_device)
    group = Lockstep(comm, control, device, number)
    calls.group = group
    vars(model)[MARK] = group
    guard(model)
    return model


def _check_same(subject: Subject, control: Comm) -> None:
    """Every rank has made the same model, by class, config and samples of its weights."""
    described = f"{subject.model_class.__name__} {subject.config.to_json_string(use_diff=False)}"
    tensors = [] if subject.model is None else list(subject.model.named_parameters())
    models, weights = which_differ(control, [digest(described.encode()), weights_digest(tensors)])
    if models:
        raise UsageError(
            f"model: ranks {models} have another model than rank 0, by class or config; under torchrun every "
            "rank makes the same one",
            field="model",
        )
    if weights:
        raise UsageError(
            f"model: ranks {weights} have other weights than rank 0; under torchrun every rank loads the "
            "same checkpoint (or seeds torch alike before it makes random weights)",
            field="model",
        )


def _shared_plan(subject: Subject, tp: int, policy: Any, control: Comm) -> tuple[Plan, int]:
    """Rank 0's plan, and a number for the group; its failure is every rank's."""
    answer: dict[str, Any] = {}
    failure: ShoalError | None = None
    if control.rank == 0:
        try:
            plan = make_plan(subject, tp, policy)
            answer = {"plan": plan.to_dict(), "number": secrets.randbits(62)}
        except ShoalError as error:
            failure = error
            answer = {"error": type(error).__name__, "message": str(error)}
    told = json.loads(share_bytes(control, json.dumps(answer).encode()))
    if failure is not None:
        raise failure
    if "error" in told:
        raise getattr(shoal.errors, told["error"], PlanError)(told["message"])
    return Plan.from_dict(told["plan"]), int(told["number"])
