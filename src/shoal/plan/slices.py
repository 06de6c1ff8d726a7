"""Which part of each checkpoint tensor a rank reads. Knows no file format and reads nothing itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shoal.errors import PlanError
from shoal.plan.types import Plan, Split, TensorSlice, pattern_of

__all__ = ["direct_tensors", "once_parameters", "slices", "split_parameters", "zero_names"]


def direct_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, owning module, attribute) of every parameter and buffer, tied ones under each name."""
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{prefix}{attribute}", module, attribute


def split_parameters(plan: Plan, model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Split, int]]:
    """(full name, owning module, attribute, split, dim) of every tensor the plan cuts.

    A bias that is split follows its weight: it is cut along dimension 0 by the weight's ranges, under
    each name it is tied to.
    """
    found: dict[int, tuple[Split, int]] = {}
    others: list[tuple[str, nn.Module, str]] = []
    for name, module, attribute in list(direct_tensors(model)):
        split, dim = _split_of(plan, name)
        if split is None:
            others.append((name, module, attribute))
        elif split.is_split:
            found[id(getattr(module, attribute))] = (split, dim)
            yield name, module, attribute, split, dim
    for name, module, attribute in others:
        entry = found.get(id(getattr(module, attribute)))
        if entry is not None:
            yield name, module, attribute, *entry


def _split_of(plan: Plan, name: str) -> tuple[Split | None, int]:
    """What the plan says of a tensor, and the dimension; None where it says nothing."""
    split = plan.split_of(name)
    if split is not None:
        return split, split.dim
    if name.endswith("bias"):
        weight = plan.split_of(f"{name.removesuffix('bias')}weight")
        if weight is not None and weight.bias == "split":
            return weight, 0
    return None, 0


def once_parameters(plan: Plan, model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, owning module, attribute) of every parameter that only rank 0 adds: those the plan says so
    of, and biases of linears whose results are summed later.
    """
    late = {weight for reduction in plan.reductions for weight in reduction.weights}
    for name, module, attribute in direct_tensors(model):
        if attribute not in module._parameters:
            continue
        split = plan.split_of(name)
        weight = f"{name.removesuffix('bias')}weight"
        is_late_bias = attribute == "bias" and (weight in late or pattern_of(weight) in late)
        if (split is not None and split.op == "once") or (split is None and is_late_bias):
            yield name, module, attribute


def slices(plan: Plan, model: nn.Module, rank: int) -> dict[str, TensorSlice]:
    """What ``rank`` reads of each tensor that the plan splits.

    Args:
        plan: a plan made for this model.
        model: the whole, unsharded model (on meta is enough): only names and shapes are used.
        rank: 0 to ``plan.tp - 1``.

    Returns:
        full parameter (or buffer) name -> dimension and ranges in the layout the model's own tensor
        has, which is the checkpoint's. Tensors not listed are read whole. Tied tensors are listed under
        each of their names.

    Raises:
        PlanError: the rank or a shape does not fit the plan.
    """
    check_rank(plan, rank)
    found: dict[str, TensorSlice] = {}
    for name, module, attribute, split, dim in split_parameters(plan, model):
        size = getattr(module, attribute).shape[dim]
        if size != split.size:
            raise PlanError(f"{name}: dimension {dim} is {size} long, the plan was made for {split.size}")
        found[name] = TensorSlice(dim, split.ranges[rank], size)
    return found


def zero_names(plan: Plan, model: nn.Module, rank: int) -> frozenset[str]:
    """Full names of the parameters that are zero on ``rank``, since only rank 0 adds them; nothing of them is
    read."""
    return frozenset() if rank == 0 else frozenset(name for name, _, _ in once_parameters(plan, model))


def check_rank(plan: Plan, rank: int) -> None:
    """Raise PlanError unless ``rank`` is one of the plan's."""
    if not 0 <= rank < plan.tp:
        raise PlanError(f"rank {rank} is not one of the plan's {plan.tp}")
