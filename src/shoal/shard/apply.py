"""Carry a plan out on a model, for one rank. Decides nothing: what is split how is the plan's to say."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shoal.comm.base import Comm
from shoal.errors import PlanError
from shoal.plan.cutting import argument_hook, cut_ranges
from shoal.plan.linears import is_splittable
from shoal.plan.slices import check_rank, split_parameters
from shoal.plan.types import ArgumentSlice, Patch, Plan, Range, Split, pattern_of
from shoal.shard.layers import Adopter, set_features

__all__ = ["shard"]


def shard(model: nn.Module, plan: Plan, rank: int, comm: Comm) -> None:
    """Make ``model`` this rank's part of the split model, in place.

    Parameter names stay; shapes become the rank's. Weights that are there are cut, and the full tensors
    released; on meta only shapes change, and :func:`shoal.plan.slices.slices` (asked before) says what to
    load. Tied parameters stay one parameter.

    Args:
        model: the whole model the plan was made for, any depth, on any device or on meta.
        plan: how to split it.
        rank: which part; must be ``comm.rank``.
        comm: the group of ``plan.tp`` ranks.

    Raises:
        PlanError: plan, rank, group and model do not fit together. The model may then be half changed.
    """
    check_rank(plan, rank)
    if (comm.rank, comm.size) != (rank, plan.tp):
        raise PlanError(f"rank {rank} of {plan.tp} wanted, the group says {comm.rank} of {comm.size}")
    if plan.tp == 1:
        return
    _cut_parameters(model, plan, rank)
    _adopt_modules(model, plan, rank, Adopter(comm))
    _patch_integers(model, plan.patches, rank)
    _slice_arguments(model, plan.args, rank)


def _cut_parameters(model: nn.Module, plan: Plan, rank: int) -> None:
    """Replace every split parameter and buffer by the rank's part; what was tied stays tied."""
    cut: dict[int, tuple[torch.Tensor, tuple[int, tuple[Range, ...]], torch.Tensor]] = {}
    for name, module, attribute, split, dim in list(split_parameters(plan, model)):
        tensor: torch.Tensor = getattr(module, attribute)
        ranges = split.ranges[rank]
        if id(tensor) in cut:
            _, how, part = cut[id(tensor)]
            if how != (dim, ranges):
                raise PlanError(f"{name} is tied to a parameter that is split in another way")
        else:
            if tensor.shape[dim] != split.size:
                raise PlanError(
                    f"{name}: {tensor.shape[dim]} along {dim}, the plan was made for {split.size}"
                )
            part = cut_ranges(tensor.detach(), dim, ranges)
            if isinstance(tensor, nn.Parameter):
                part = nn.Parameter(part, requires_grad=tensor.requires_grad)
            # The full tensor stays referenced until the end, so that its id is not given to another.
            cut[id(tensor)] = (tensor, (dim, ranges), part)
        setattr(module, attribute, part)
    _check_whole(model, plan, cut)


def _check_whole(model: nn.Module, plan: Plan, cut: dict[int, Any]) -> None:
    """A parameter that was cut must not live on, whole, under another name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in cut:
            raise PlanError(f"{name} is tied to a split parameter, but the plan does not split it")


def _adopt_modules(model: nn.Module, plan: Plan, rank: int, adopter: Adopter) -> None:
    """Give every linear and embedding whose weight was cut the behaviour its split asks for."""
    for name, module in list(model.named_modules()):
        split = plan.split_of(f"{name}.weight")
        if split is None or not split.is_split or not is_splittable(module):
            continue
        if split.op in ("column", "row"):
            set_features(module)
        _adopt(name, module, split, rank, adopter)


def _adopt(name: str, module: nn.Module, split: Split, rank: int, adopter: Adopter) -> None:
    is_embedding = isinstance(module, nn.Embedding)
    if split.op == "row" and not is_embedding:
        adopter.reduce_outputs(module)
    elif split.op == "gather" and not is_embedding:
        adopter.gather_outputs(module, split.sizes)
    elif split.op == "vocab" and is_embedding and len(split.ranges[rank]) == 1:
        adopter.split_vocabulary(module, split.ranges[rank][0][0])
    elif split.op != "column":
        raise PlanError(f"{name}: {type(module).__name__} cannot be split by {split.op!r}")


def _patch_integers(model: nn.Module, patches: Iterable[Patch], rank: int) -> None:
    modules = [(pattern_of(name), module) for name, module in model.named_modules()]
    for patch in patches:
        hits = 0
        for pattern, module in modules:
            if pattern == patch.module and type(module).__name__ == patch.class_name:
                hits += _patch(module, patch, patch.values[rank])
        if not hits:
            raise PlanError(f"no {patch.class_name} at {patch.module} has {patch.attribute} = {patch.old}")


def _patch(module: nn.Module, patch: Patch, value: int) -> bool:
    """Set the attribute if it holds the old value; a config is copied first, it may be shared."""
    holder: Any = module
    attribute = patch.attribute
    if attribute.startswith("config."):
        attribute = attribute.removeprefix("config.")
        holder = copy.copy(module.config)
    if getattr(holder, attribute, None) != patch.old:
        return False
    setattr(holder, attribute, value)
    if holder is not module:
        module.config = holder
    return True


def _slice_arguments(model: nn.Module, arguments: Iterable[ArgumentSlice], rank: int) -> None:
    """Have modules cut the arguments they are called with."""
    modules = [(pattern_of(name), module) for name, module in model.named_modules()]
    for argument in arguments:
        for pattern, module in modules:
            if pattern == argument.module:
                module.register_forward_pre_hook(argument_hook(argument, rank), with_kwargs=True)
