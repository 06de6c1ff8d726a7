"""Zoo models made ready to be fused, and single layers of them with what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from shoal.attention.cpu import CpuPaged
from shoal.attention.hook import AttentionContext, attach
from shoal.comm.base import Comm
from shoal.comm.local import LocalComm
from shoal.fuse.record import LayerCall
from shoal.fuse.replace import FusedLayers, fuse_layers
from shoal.jit.team import Team
from shoal.plan.types import Plan
from shoal.prove.prove import plan_and_prove
from support.zoo.build import build
from support.zoo.catalogue import family_of

__all__ = ["TOKENS", "Ready", "fuse", "layer_call", "planned", "ready", "zoo_model"]

TOKENS = 19  # no dimension of a zoo model


class Ready(NamedTuple):
    """A model whose attention is ours and has been measured."""

    model: PreTrainedModel
    context: AttentionContext
    kernel: CpuPaged


def zoo_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A family's tiny model, every weight random."""
    return build(family_of(name), "eager", dtype)


@cache
def planned(name: str, ranks: int) -> Plan:
    """How a family is split."""
    return plan_and_prove(*family_of(name).load(), ranks)


@torch.inference_mode()
def ready(model: PreTrainedModel, team: Team) -> Ready:
    """Attach a model to a CPU kernel, and run it once."""
    kernel = CpuPaged(team)
    context = AttentionContext(kernel)
    attach(model, context)
    model(input_ids=torch.arange(3, 12)[None], use_cache=False)
    context.batch = None  # the pass is over: what runs from now on calls the same layers
    return Ready(model, context, kernel)


def fuse(parts: Ready, storage: str = "float32", comm: Comm | None = None) -> FusedLayers:
    """Fuse what can be."""
    return fuse_layers(parts.model, parts.context, parts.kernel, comm or LocalComm(), storage)


@torch.inference_mode()
def layer_call(
    model: PreTrainedModel, path: str, team: Team, change: Callable[[Any], None] | None = None
) -> tuple[nn.Module, LayerCall]:
    """A layer of a model, changed if that is asked for, and how it is called, with random hidden states."""
    layer, calls = model.get_submodule(path), []
    if change is not None:
        change(layer)
    attach(model, AttentionContext(CpuPaged(team)))

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall(args, dict(kwargs)))

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    model(input_ids=torch.arange(TOKENS)[None], use_cache=False)
    handle.remove()
    hidden = torch.randn(calls[0].hidden.shape, generator=torch.Generator().manual_seed(0))
    return layer, calls[0].with_hidden(hidden)
