"""Carry a plan out on a model, for one rank. Decides nothing: what is split how is the plan's to say."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.comm.base import Comm
from shoal.errors import PlanError
from shoal.plan.cutting import argument_hook, cut_ranges
from shoal.plan.linears import is_splittable
from shoal.plan.repair import repair
from shoal.plan.slices import check_rank, once_parameters, split_parameters
from shoal.plan.types import ArgumentSlice, Patch, Plan, Range, Reshape, Split, pattern_of
from shoal.shard.experts import deal_experts
from shoal.shard.factors import FactorOwner
from shoal.shard.late import reduce_late
from shoal.shard.layers import Adopter, set_features
from shoal.shard.link import Link
from shoal.shard.mixing import take_over

__all__ = ["shard"]

_log = logging.getLogger("shoal.shard")

_GROUPED_MM_BYTES = 16  # torch's grouped_mm refuses matrices whose rows are no multiple of so many


def shard(model: nn.Module, plan: Plan, rank: int, comm: Comm) -> Link | None:
    """Make ``model`` this rank's part of the split model, in place.

    Parameter names stay; shapes become the rank's. Weights that are there are cut, and the full tensors
    released; on meta only shapes change, and :func:`shoal.plan.slices.slices` (asked before) says what to
    load. Tied parameters stay one parameter.

    Args:
        model: the whole model the plan was made for, any depth, on any device or on meta.
        plan: how to split it.
        rank: which part; must be ``comm.rank``.
        comm: the group of ``plan.tp`` ranks.

    Returns:
        what the model's modules reach the group through; None: there is one rank, which needs none.

    Raises:
        PlanError: plan, rank, group and model do not fit together. The model may then be half changed.
    """
    check_rank(plan, rank)
    if (comm.rank, comm.size) != (rank, plan.tp):
        raise PlanError(f"rank {rank} of {plan.tp} wanted, the group says {comm.rank} of {comm.size}")
    if plan.tp == 1:
        return None
    link = Link(comm)
    _empty_terms(model, plan, rank)
    raw = _cut_parameters(model, plan, rank)
    _patch_integers(model, plan.patches, rank)
    deferred = reduce_late(model, plan, link)
    _adopt_modules(model, plan, rank, deferred, Adopter(link))
    _adopt_owners(raw, rank, deferred, link)
    _slice_arguments(model, plan.args, rank)
    _repair_reshapes(model, plan.reshapes, rank)
    return link


@dataclass(frozen=True, slots=True)
class _Raw:
    """A parameter that was cut and is no weight or bias of a linear or an embedding."""

    name: str
    module: nn.Module
    attribute: str
    split: Split


def _empty_terms(model: nn.Module, plan: Plan, rank: int) -> None:
    """Zeros for what only rank 0 adds."""
    terms = list(once_parameters(plan, model))
    names = {name for name, _, _ in terms}
    emptied = {id(module._parameters[attribute]) for _, module, attribute in terms}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in emptied and name not in names:
            raise PlanError(f"{name} is tied to a parameter that only rank 0 keeps, and is used elsewhere")
    if rank == 0:
        return
    for _, module, attribute in terms:
        whole = module._parameters[attribute]
        assert whole is not None
        module._parameters[attribute] = nn.Parameter(torch.zeros_like(whole), whole.requires_grad)


def _cut_parameters(model: nn.Module, plan: Plan, rank: int) -> list[_Raw]:
    """Replace every split parameter and buffer by the rank's part; what was tied stays tied."""
    cut: dict[int, tuple[torch.Tensor, tuple[int, tuple[Range, ...]], torch.Tensor]] = {}
    raw: list[_Raw] = []
    held: set[int] = set()  # tensors of linears and embeddings, which a head may hold a second time
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
        if is_splittable(module):
            held.add(id(tensor))
        elif id(tensor) not in held:
            raw.append(_Raw(name, module, attribute, split))
    _check_whole(model, plan, cut)
    return raw


def _check_whole(model: nn.Module, plan: Plan, cut: dict[int, Any]) -> None:
    """A parameter that was cut must not live on, whole, under another name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in cut:
            raise PlanError(f"{name} is tied to a split parameter, but the plan does not split it")


def _adopt_modules(
    model: nn.Module, plan: Plan, rank: int, deferred: frozenset[str], adopter: Adopter
) -> None:
    """Give every linear and embedding whose weight was cut the behaviour its split asks for."""
    for name, module in list(model.named_modules()):
        weight = f"{name}.weight"
        split = plan.split_of(weight)
        if split is None or not split.is_split or not is_splittable(module):
            continue
        if split.op in ("column", "row"):
            set_features(module)
        if weight not in deferred:
            _adopt(name, module, split, rank, adopter)


def _adopt(name: str, module: nn.Module, split: Split, rank: int, adopter: Adopter) -> None:
    is_embedding = isinstance(module, nn.Embedding)
    if split.op == "row" and not is_embedding:
        adopter.reduce_outputs(module)
    elif split.op == "gather" and not is_embedding:
        adopter.gather_outputs(module, split.sizes)
    elif split.op == "vocab" and is_embedding and len(split.ranges[rank]) == 1:
        adopter.split_vocabulary(module, split.ranges[rank][0][0], split.size)
    elif split.op != "column":
        raise PlanError(f"{name}: {type(module).__name__} cannot be split by {split.op!r}")


def _adopt_owners(raw: Iterable[_Raw], rank: int, deferred: frozenset[str], link: Link) -> None:
    """Give modules that multiply by their own parameters the behaviour that the splits ask for."""
    owners: dict[int, list[_Raw]] = {}
    for entry in raw:
        owners.setdefault(id(entry.module), []).append(entry)
        if entry.split.op not in ("column", "row", "experts"):
            raise PlanError(
                f"{entry.name}: a parameter without a layer of its own cannot be split by {entry.split.op!r}"
            )
    for entries in owners.values():
        module = entries[0].module
        dealt = {
            (entry.split.size, entry.split.ranges[rank]) for entry in entries if entry.split.op == "experts"
        }
        factors = {
            entry.attribute for entry in entries if entry.split.op == "row" and entry.name not in deferred
        }
        if dealt:
            if len(dealt) > 1 or any(entry.split.op != "experts" for entry in entries):
                raise PlanError(f"{entries[0].name}: all stacks of one module must be dealt alike")
            ((count, ranges),) = dealt
            deal_experts(module, count, ranges, link, any(entry.name in deferred for entry in entries))
        elif factors:
            take_over(module, FactorOwner, link, row_factors=frozenset(factors))
        _avoid_grouped_mm(entries)


def _avoid_grouped_mm(entries: Sequence[_Raw]) -> None:
    """Have experts computed one by one where a rank's rows do not fit torch's ``grouped_mm``."""
    module = entries[0].module
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) != "grouped_mm":
        return
    for entry in entries:
        parameter = module._parameters.get(entry.attribute)
        if parameter is None or parameter.dim() != 3 or entry.split.op == "experts":
            continue
        # Every rank looks at all: they must call the same collectives.
        if any(size * parameter.element_size() % _GROUPED_MM_BYTES for size in entry.split.sizes):
            _log.info(
                "%s: shares of %s are no multiples of %d bytes, which grouped_mm needs: experts are computed "
                "one by one", entry.name, entry.split.sizes, _GROUPED_MM_BYTES,
            )  # fmt: skip
            own: Any = copy.copy(config)  # it may be shared
            own._experts_implementation = "eager"
            module.config = own
            return


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


def _repair_reshapes(model: nn.Module, reshapes: Sequence[Reshape], rank: int) -> None:
    """Have modules reshape to the rank's widths where they would to the whole model's."""
    for name, module in list(model.named_modules()):
        widths = [(entry.old, entry.values[rank]) for entry in reshapes if entry.module == pattern_of(name)]
        if widths:
            repair(module, widths)
