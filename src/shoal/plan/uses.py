"""What one operation on a weight amounts to: a linear's or an embedding's own use, a product of the
module's own code, or something else. Knows no recording and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.plan.calls import Call, Kind
from shoal.plan.contraction import Analyser, Contraction, Operation
from shoal.plan.features import Features, last_dim, places
from shoal.plan.linears import input_dim, input_size, is_linear, is_splittable, output_dim, output_size
from shoal.plan.owners import Owners

__all__ = ["Description", "Use", "carries_features", "describe", "describe_product"]


@dataclass(frozen=True, slots=True)
class Use:
    """One operation that mixes a weight with real tensors."""

    weight: str
    is_own: bool  # the module that has the weight under this name is running
    function: str
    operation: Operation
    inputs: tuple[torch.Tensor, ...]  # floating-point, of two dimensions or more
    index: int  # how often the weight was used before
    is_alone: bool  # no other weight takes part
    result_on_meta: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Description:
    """What a use is; ``how`` only of a product."""

    kind: Kind
    inputs: tuple[torch.Tensor, ...]
    input_features: Features | None = None
    output_features: Features | None = None
    how: Contraction | None = None


def describe(use: Use, owners: Owners, analyser: Analyser) -> Description:
    """The kind of a use, its inputs, and which features it takes and makes."""
    owner, _, attribute = use.weight.rpartition(".")
    module = owners.modules[owner]
    if use.is_own and attribute == "weight" and is_splittable(module):
        own = _own_use(use, module, owners)
        if own is not None:
            return own
    return _product(use, owners, analyser) or Description("raw", use.inputs)


def _own_use(use: Use, module: nn.Module, owners: Owners) -> Description | None:
    """A linear or an embedding that does what it is there for, with all of its weight."""
    weight = use.operation.weight
    size_in, size_out = input_size(module), output_size(module)
    if weight.numel() != size_in * size_out or owners.origin(weight) is None:
        return None
    shape = (size_out, size_in) if output_dim(module) == 0 else (size_in, size_out)
    made = last_dim(size_out, shape, output_dim(module))
    if isinstance(module, nn.Embedding):
        is_look_up = use.function == "embedding" and not use.inputs
        return Description("embedding", (), None, made) if is_look_up else None
    # A class of its own may multiply groups of rows by groups of columns.
    is_plain = weight.shape in (shape, shape[::-1])
    if is_linear(module) and is_plain and len(use.inputs) == 1 and use.inputs[0].shape[-1] == size_in:
        return Description("linear", use.inputs, last_dim(size_in, shape, input_dim(module)), made)
    return None


def _product(use: Use, owners: Owners, analyser: Analyser) -> Description | None:
    """A plain product or look-up of one weight that lies in its parameter as it is."""
    if owners.origin(use.operation.weight) is None or not use.is_alone or use.operation.weight.dim() < 2:
        return None
    how = analyser.analyse(use.operation)
    return None if how is None else describe_product(use, owners, how)


def describe_product(
    use: Use, owners: Owners, how: Contraction, wanted: Collection[int] | None = None
) -> Description | None:
    """The inputs and features of a product whose dimensions have these roles; None if it cannot have them.

    Features' places are told for the ``wanted`` dimensions of the parameter; None: for all.
    """
    weight, floats = use.operation.weight, use.operation.floats
    origin = owners.origin(weight)
    if origin is None or not use.is_alone or not how.fits(use.operation):
        return None

    def features(pairs: Sequence[tuple[int, int]]) -> Features:
        ordered = sorted(pairs, key=lambda pair: pair[1])
        own_dims = [own for own, _ in ordered]
        sizes = tuple(weight.shape[own] for own in own_dims)
        where = places(origin, weight.shape, own_dims, wanted)
        return Features(tuple(other for _, other in ordered), sizes, origin.shape, where)

    if how.input < 0:
        return Description("product", (), None, features(how.outputs), how)
    return Description("product", (floats[how.input],), features(how.summed), features(how.outputs), how)


def carries_features(how: Contraction, x: torch.Tensor, calls: Sequence[Call]) -> bool:
    """Whether a dimension that a product keeps of its input runs over features of earlier weights.

    Of stacked experts it runs over experts, which get the same features; of a factor per head it runs over
    heads, and a stub in its place would lose which feature belongs to which head.
    """
    leaves = [call.output for call in calls]
    if not how.batches or not x.requires_grad or not leaves:
        return False
    for _, dim in how.batches:
        least = x.shape[dim] * max(1, *(x.shape[other] for _, other in how.summed))
        supports = [_support(x, dim, index, leaves) for index in (0, x.shape[dim] - 1)]
        for call, first, last in zip(calls, *supports, strict=True):
            is_large = call.num_outputs >= least and first is not None and last is not None
            if is_large and not torch.equal(_reached(call, first), _reached(call, last)):
                return True
    return False


def _support(
    x: torch.Tensor, dim: int, index: int, leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    with torch._C.DisableTorchFunction():
        cotangent = torch.zeros_like(x)
        part = cotangent.select(dim, index)
        part.normal_(generator=torch.Generator().manual_seed(5))
        return torch.autograd.grad(x, leaves, cotangent, retain_graph=True, allow_unused=True)


def _reached(call: Call, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return torch.zeros(call.num_outputs, dtype=torch.bool)
    return (call.produced(gradient).reshape(-1, call.num_outputs) != 0).any(0)
