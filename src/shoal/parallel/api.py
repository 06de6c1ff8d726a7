"""``shoal.parallelize``: from a transformers model, or its name, to one that runs on several ranks. The only
file of the room that a program calls.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from shoal.comm.local import LocalComm
from shoal.errors import UsageError
from shoal.parallel.build import build_part
from shoal.parallel.entry import Calls
from shoal.parallel.join import join_group
from shoal.parallel.request import MARK, Request, read_request
from shoal.parallel.start import start_group
from shoal.parallel.subject import Subject, read_subject
from shoal.parallel.transfer import cast_and_move, parcels
from shoal.plan.types import Plan

__all__ = ["close", "parallelize", "parallelized"]

_log = logging.getLogger("shoal.parallel")


def parallelize(
    model: Any,
    tp: int | None = None,
    policy: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    mp_size: int | None = None,
    injection_policy: Any = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    revision: str | None = None,
    comm: str = "auto",
    timeout_s: float = 600.0,
) -> Any:
    """Run a transformers model over several ranks, for inference.

    In a plain program this process becomes rank 0 and starts the others; they end with the model, with
    :func:`close`, or with this process. Under torchrun every rank calls this with the same model, keeps its
    part, and makes the same calls from then on; the outputs are the same on every rank.

    The model stays the same object, and ``forward``, ``generate`` and calls of its submodules give what
    they gave before, without gradients. What is its rank's own: ``state_dict()`` and the weights hold this
    rank's part, ``output_attentions`` the heads of rank 0, and a cache the keys and values of rank 0 (what
    is done to it between calls is done by every rank). Forward hooks run on every rank, each on a copy.
    ``save_pretrained``, copying, casting and moving are refused, and so is a call after an attribute, a
    submodule or a parameter of a module was exchanged.

    Args:
        model: a transformers model in memory (a pipeline's ``.model``, a class of one's own), or a folder,
            hub id or ``"demo"``: then each rank reads only its part of the files.
        tp: number of ranks. None: under torchrun as many as it started; else as many as there are CUDA
            devices to be used; else 1.
        policy: how to split, where the measured way is not wanted: DeepSpeed's ``injection_policy``, a
            transformers ``tp_plan``, or a policy file. It is proved like any other plan.
        device: ``cpu`` or ``cuda`` (rank r takes the r-th device). None: where the model is; for a path, or
            where ``tp`` is left out too, CUDA if there is any.
        dtype: of the weights, as ``from_pretrained`` takes it. None: as they are.
        mp_size: DeepSpeed's name for ``tp``.
        injection_policy: DeepSpeed's name for ``policy``.
        trust_remote_code: whether code that comes with a checkpoint may be run.
        attn_implementation: transformers' name of the attention to use. None: as it is.
        revision: branch, tag or commit of a hub model.
        comm: what ranks on CPUs sum over: ``shm`` (memory they share), ``gloo``, or ``auto``: shared memory
            where it can be had.
        timeout_s: seconds after which a rank that does not answer is given up.

    Returns:
        the model, in eval mode. With one rank it is an ordinary model, moved and cast as asked.

    Raises:
        UsageError: an argument is wrong, or the model cannot be parallelized; the message says why.
        PlanError: no plan for it proves right, or the policy asks for what is wrong.
        RankError: a rank could not be started.
    """
    if policy is not None and injection_policy is not None:
        raise UsageError("injection_policy: pass it or policy, not both", field="injection_policy")
    request = read_request(model, tp, mp_size, device, dtype, comm)
    subject = read_subject(model, request.dtype, attn_implementation, trust_remote_code, revision)
    policy = injection_policy if policy is None else policy
    if request.place is not None:
        return join_group(subject, request, policy, timeout_s)
    if request.tp > 1:
        return start_group(subject, request, policy, timeout_s)
    if tp is None and mp_size is None:
        _log.warning("one rank on %s: pass tp= to use more", request.device.kind)
    return _single(subject, request)


def _single(subject: Subject, request: Request) -> PreTrainedModel:
    """The whole model on one device."""
    device = request.device
    if subject.recipe is not None:
        return build_part(subject.recipe, Plan(1, subject.model_class.__name__), LocalComm(), device, Calls())
    assert subject.model is not None
    places = [(parcel.names, parcel.dtype) for parcel in parcels(subject.model, request.dtype)]
    cast_and_move(subject.model, places, device.torch_device)
    return subject.model.eval()


def close(model: Any) -> None:
    """Stop the ranks of a parallel model; calling it raises from then on. Harmless on any other model, and
    the second time.
    """
    group = vars(model).get(MARK)
    if group is not None:
        group.close()


@contextlib.contextmanager
def parallelized(model: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """:func:`parallelize` for the length of a ``with`` block, and :func:`close` at its end."""
    parallel = parallelize(model, *args, **kwargs)
    try:
        yield parallel
    finally:
        close(parallel)
