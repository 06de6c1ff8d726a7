"""The splits that a user's policy asks for, made as it says. Knows no data flow: that a wish is right is
for a proof to show, which finds these splits by their reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from shoal.errors import PlanError
from shoal.plan.fallback import Inventory, fallback_split
from shoal.plan.linears import input_dim, output_dim
from shoal.plan.types import BiasRule, Reduction, Split, even_ranges, pattern_of
from shoal.plan.wishes import Wish

__all__ = ["ASKED", "asked_reductions", "asked_splits", "is_asked", "is_left_over"]

ASKED = "the policy asks for it"
_LEFT = "; what else it asks for leaves nothing of what was measured"


def is_asked(split: Split) -> bool:
    """Whether a split is there because a policy says so, and not because it was measured."""
    return split.reason.startswith(ASKED)


def is_left_over(split: Split) -> bool:
    """Whether a split was measured to be as the policy asks, but for another wish of the policy."""
    return split.reason.endswith(_LEFT)


def asked_splits(
    wishes: Mapping[str, Wish],
    literal: Mapping[str, int],
    inventory: Inventory,
    model: nn.Module,
    splits: Mapping[str, Split],
    tp: int,
) -> dict[str, Split]:
    """``splits`` with what the policy asks for in place of what was derived.

    Args:
        wishes: weight pattern -> what is asked for it.
        literal: patterns of which the policy's column or row is cut into even parts: those not measured
            to be so (round 0), and those that were, but with the former (later rounds).
        inventory: of the model.
        model: the whole model; meta is enough.
        splits: as derived.
        tp: number of ranks.

    Raises:
        PlanError: fewer features or experts than ranks.
    """
    found = dict(splits)
    for pattern, wish in wishes.items():
        if wish.op in ("column", "row") and pattern not in literal:
            continue
        own = _one_split(pattern, wish, inventory, model, tp)
        if literal.get(pattern, 0) > 0:
            own = {name: replace(split, reason=split.reason + _LEFT) for name, split in own.items()}
        for name in [name for name in found if pattern_of(name) == pattern]:
            del found[name]
        found |= own
    return found


def asked_reductions(wishes: Mapping[str, Wish]) -> tuple[Reduction, ...]:
    """Where the results of experts that are dealt out whole are summed: in the output of their module."""
    homes: dict[str, list[str]] = {}
    for pattern, wish in wishes.items():
        if wish.op == "experts":
            homes.setdefault(pattern.rpartition(".")[0], []).append(pattern)
    return tuple(Reduction(module, 0, tuple(weights)) for module, weights in homes.items())


def _one_split(pattern: str, wish: Wish, inventory: Inventory, model: nn.Module, tp: int) -> dict[str, Split]:
    """The splits of one pattern: one, or one a name where layers differ in shape."""
    if wish.op == "replicate":
        return {pattern: Split("replicate", reason=ASKED)}
    modules = inventory.modules.get(pattern)
    if modules is None:
        return {pattern: _raw_split(pattern, wish, model, tp)}
    made = [_module_split(pattern, wish, module, tp) for module in modules]
    return (
        {pattern: made[0]} if len(set(made)) == 1 else dict(zip(inventory.names[pattern], made, strict=True))
    )


def _module_split(pattern: str, wish: Wish, module: nn.Module, tp: int) -> Split:
    if wish.op in ("gather", "vocab"):
        split = fallback_split(module, tp, ASKED)
    else:
        dim = output_dim(module) if wish.op == "column" else input_dim(module)
        weight = module.get_parameter("weight")
        size = weight.shape[dim]
        has_bias = getattr(module, "bias", None) is not None
        bias: BiasRule = "none" if not has_bias else "split" if wish.op == "column" else "once"
        split = Split(wish.op, dim, size, even_ranges(size, tp), bias, ASKED)
    if not split.is_split or split.size < tp:
        raise PlanError(f"policy: {wish.key}: {pattern} as {wish.op}: it has fewer than {tp} parts")
    return split


def _raw_split(pattern: str, wish: Wish, model: nn.Module, tp: int) -> Split:
    """A parameter that no linear or embedding holds."""
    shapes = {tuple(p.shape) for name, p in model.named_parameters() if pattern_of(name) == pattern}
    what = f"policy: {wish.key}: {pattern} as {wish.op}"
    if len(shapes) != 1:
        raise PlanError(f"{what}: layers differ in its shape")
    shape = shapes.pop()
    # As transformers' styles cut stacks of matrices: [..., out, in].
    dim = {"column": max(0, len(shape) - 2), "row": len(shape) - 1}.get(wish.op, 0)
    if shape[dim] < tp:
        raise PlanError(f"{what}: {shape[dim]} are fewer than {tp} ranks")
    return Split(wish.op, dim, shape[dim], even_ranges(shape[dim], tp), "none", ASKED)
