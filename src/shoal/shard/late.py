"""Sums over ranks that are done late: once, in the output of a module around the split weights. Knows no
layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.reductions import reducing_modules
from shoal.plan.types import Plan, pattern_of
from shoal.shard.link import Link

__all__ = ["reduce_late"]


@dataclass(frozen=True, slots=True)
class _LateSum:
    """A forward hook that sums one of a module's outputs over ranks."""

    link: Link
    output: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor) and self.output == 0:
            return self.link.comm.all_reduce(output)
        if type(output) in (tuple, list) and self.output < len(output):
            partial = output[self.output]
            if isinstance(partial, torch.Tensor):
                summed = self.link.comm.all_reduce(partial)
                return type(output)((*output[: self.output], summed, *output[self.output + 1 :]))
        raise PlanError(f"{type(module).__name__} gives no tensor as output {self.output} to sum over ranks")


def reduce_late(model: nn.Module, plan: Plan, link: Link) -> frozenset[str]:
    """Have the modules that hold a reduction's weights sum their output.

    Returns:
        full names of the weights whose results are to stay partial.

    Raises:
        PlanError: a weight gives no partial results, or lies in no such module, or in several.
    """
    listed = {weight for reduction in plan.reductions for weight in reduction.weights}
    deferred: set[str] = set()
    for module, reduction, weights in reducing_modules(model, plan.reductions):
        if deferred & weights:
            raise PlanError(f"{min(deferred & weights)} would be summed over ranks twice")
        deferred |= weights
        # Before any other hook, so that whoever watches the module's output sees the whole.
        module.register_forward_hook(_LateSum(link, reduction.output), prepend=True)
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in deferred and {name, pattern_of(name)} & listed:
            raise PlanError(f"{name} lies in no module that sums its results over ranks")
        split = plan.split_of(name)
        if name in deferred and (split is None or split.op not in ("row", "experts")):
            raise PlanError(f"{name} is whole or not summed, and so cannot be summed late")
    return frozenset(deferred)
