"""Sees every operation of a model whose weights are on meta, and hands on those that mix a weight with real
tensors. Knows no recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shoal.errors import PlanError
from shoal.plan.contraction import Analyser, Operation, tensors_in
from shoal.plan.owners import Owners
from shoal.plan.random import is_random
from shoal.plan.uses import Use

__all__ = ["Interceptor"]

# Asking these of a weight computes nothing.
_METADATA = {
    "__get__", "size", "dim", "numel", "untyped_storage", "stride", "storage_offset", "is_floating_point",
    "data_ptr", "__repr__", "element_size", "is_contiguous", "__len__", "is_complex", "ndimension",
    "__hash__", "is_tensor", "nelement", "get_device",
}  # fmt: skip
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm"}


class Interceptor(TorchFunctionMode):
    """Hands every operation on weights and real tensors to ``self.use``."""

    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self.owners = owners
        self.analyser = Analyser()
        self.counts: dict[str, int] = {}
        self.num_broadcasts = 0
        self.operations: dict[str, int] = {}
        self.draws: set[str] = set()
        self.step = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # looking at tensors is no operation of the model's
            tensors = list(tensors_in((*args, *kwargs.values())))
            metas = [tensor for tensor in tensors if tensor.is_meta]
            name = getattr(func, "__name__", "")
            self.operations[name] = self.operations.get(name, 0) + 1
            if is_random(func, kwargs):
                self.draws.add(name)
            if metas and func == torch.Tensor.device.__get__:
                return torch.device("cpu")  # what code creates "where the weight is" must be real
            is_plain = not metas or name in _METADATA
            if is_plain:
                self.num_broadcasts += name in _PRODUCTS and _broadcasts(tensors)
        if is_plain:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._on_weights(func, name, args, kwargs, tensors, metas)

    def _on_weights(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        metas: list[torch.Tensor],
    ) -> Any:
        """The result of an operation on weights alone, or on weights and real tensors."""
        reals = [tensor for tensor in tensors if not tensor.is_meta]
        if name in ("__getitem__", "select", "index_select") and len(reals) == 1 and reals[0].numel() == 1:
            plain = int(reals[0])  # one expert chosen by a tensor: a view of the weight
            args = tuple(plain if value is reals[0] else value for value in args)
            reals = []
        if not reals:
            result = func(*args, **kwargs)
            for derived in tensors_in(result if isinstance(result, (tuple, list)) else (result,)):
                if derived.is_meta:
                    self.owners.derive(name, metas, derived)
            return result
        weight = self.owners.known(metas)
        chosen = self.owners.look_up(name, weight, args) if len(metas) == 1 else None
        if chosen is not None:
            return chosen
        return self.use(self._use_of(Operation(func, args, kwargs, weight), name, metas, reals))

    def _use_of(
        self, operation: Operation, name: str, metas: list[torch.Tensor], reals: list[torch.Tensor]
    ) -> Use:
        full_name, is_own = self.owners.name(operation.weight)
        index = self.counts[full_name] = self.counts.get(full_name, -1) + 1
        inputs = tuple(tensor for tensor in reals if tensor.is_floating_point() and tensor.dim() >= 2)
        owners = self.owners.owners(metas)
        if len(owners) > 1:
            self.owners.entangled |= owners

        def shape() -> torch.Tensor:
            result = operation.func(*_to_meta(operation.args), **_to_meta(operation.kwargs))
            if not isinstance(result, torch.Tensor):
                raise PlanError(f"{name} of {full_name} gives no tensor")
            return result

        is_alone = len({id(tensor) for tensor in metas}) == 1
        return Use(full_name, is_own, name, operation, inputs, index, is_alone, shape)

    def use(self, use: Use) -> torch.Tensor:
        """The result of one use of a weight."""
        raise NotImplementedError


def _broadcasts(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the batch dimensions of a product differ."""
    batches = {tuple(tensor.shape[:-2]) for tensor in tensors if tensor.dim() > 2}
    return len(batches) > 1


def _to_meta(value: Any) -> Any:
    """The same arguments with every real tensor replaced by one of its shape on meta."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(_to_meta(item) for item in value)
    return value
