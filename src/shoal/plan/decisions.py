"""Makes visible what gradients do not show: results that jump. Knows no model.

A comparison, an argmax, a sign or a rounding has no gradient, nor has anything under ``no_grad``, and so what
is computed with it would look independent of what it was computed from. While a model is recorded, results of
such operations are remembered with their sources; a floating-point value made with one is given a gradient
that leads to these. Where values and sources do not lie element by element on each other, or Python itself
asks for the value, every feature that reaches the source is needed whole, whatever becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from shoal.plan.contraction import tensors_in

__all__ = ["Decisions"]

# Floating-point results whose derivative is zero wherever there is one.
_STEPS = {
    "sign", "sgn", "round", "floor", "ceil", "trunc", "fix", "heaviside", "floor_divide", "__floordiv__",
    "__rfloordiv__", "sign_", "round_", "floor_", "ceil_", "trunc_", "floor_divide_",
}  # fmt: skip
# Each element of the result is made of the elements at its place.
_IN_PLACE_OF = {
    "gt", "lt", "ge", "le", "eq", "ne", "__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__",
    "greater", "less", "greater_equal", "less_equal", "not_equal", "isnan", "isinf", "isfinite", "isposinf",
    "isneginf", "signbit", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "__and__", "__or__", "__invert__", "__xor__", "__rand__", "__ror__", "to",
    "bool", "int", "long", "clone", "contiguous", "where", "isclose", "expand_as", "detach",
}  # fmt: skip
# Of all but the first argument, or of that too, only the shape or the dtype matters.
_LIKE = {
    "expand_as", "view_as", "reshape_as", "type_as", "zeros_like", "ones_like", "empty_like", "full_like",
    "rand_like", "randn_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
}  # fmt: skip
# Python takes the value and goes its way.
_ASKED = {"__bool__", "item", "__int__", "__float__", "__index__", "tolist", "numpy", "equal", "allclose"}
_METADATA = {
    "__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__", "ndimension",
    "__hash__", "__repr__", "data_ptr", "storage_offset", "untyped_storage", "element_size", "is_contiguous",
    "get_device", "nelement", "requires_grad_",
}  # fmt: skip


class _Reached(Function):
    """The value as it is, with a gradient that leads to the sources element by element as well."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [source.shape for source in sources]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (gradient,) = gradients
        return gradient, *(gradient.sum_to_size(shape) for shape in ctx.shapes)


class Decisions(TorchFunctionMode):
    """Follows results that jump.

    ``taken`` are operations, each with a source of which everything is needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[str, torch.Tensor]] = []
        # By identity of the result, which is held so that no other tensor takes it over; and who made it.
        self._sources: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self._makers: dict[int, str] = {}  # by identity of a source
        # Results, by identity, whose elements lie elsewhere than their sources'.
        self._loose: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _METADATA:
            return func(*args, **kwargs)
        given = [tensor for tensor in tensors_in((*args, *kwargs.values())) if not tensor.is_meta]
        smooth = [tensor for tensor in given if tensor.requires_grad and name not in _LIKE]
        # What a function with a gradient of its own made under no_grad has that gradient now.
        others = [tensor for tensor in given if not tensor.requires_grad]
        jumped = self._known(others)
        is_loose = any(id(tensor) in self._loose for tensor in others)
        if name in _ASKED:
            self._take(name, [*jumped, *smooth])
        result = func(*args, **kwargs)
        if jumped or smooth:
            result = self._followed(name, result, jumped, smooth, is_loose)
        return result

    def _take(self, name: str, sources: list[torch.Tensor]) -> None:
        """All of the sources is needed; ``name`` is said unless it is known what jumped."""
        self.taken += [(self._makers.get(id(source), name).strip("_"), source) for source in sources]

    def _known(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Sources of results that jump, each once."""
        found: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            for source in self._sources.get(id(tensor), (tensor, ()))[1]:
                found[id(source)] = source
        return list(found.values())

    def _followed(
        self, name: str, result: Any, jumped: list[torch.Tensor], smooth: list[torch.Tensor], is_loose: bool
    ) -> Any:
        """The result, its tensors remembered or given a gradient."""
        if isinstance(result, tuple | list):
            parts = [self._followed(name, part, jumped, smooth, is_loose) for part in result]
            if type(result) in (tuple, list):
                return type(result)(parts)
            self._take(name, jumped)  # a named one, of values and indices, is returned as it is
            return result
        if not isinstance(result, torch.Tensor) or result.is_meta:
            return result
        is_smooth = result.is_floating_point() or result.is_complex()
        if not is_smooth or name == "detach" or not torch.is_grad_enabled():
            self._remember(name, result, [*jumped, *smooth], is_loose)
            return result
        sources = [*jumped, *(smooth if name in _STEPS else ())]
        if not sources:
            return result
        is_in_place = (name.endswith("_") and not name.startswith("__")) or name == "__setitem__"
        if is_loose or is_in_place or not all(_fits(source, result) for source in sources):
            self._take(name, sources)
            return result
        with torch._C.DisableTorchFunction():
            reached: torch.Tensor = _Reached.apply(result, *sources)  # type: ignore[no-untyped-call]
        return reached

    def _remember(self, name: str, result: torch.Tensor, sources: list[torch.Tensor], is_loose: bool) -> None:
        self._sources[id(result)] = result, tuple(sources)
        if is_loose or name not in _IN_PLACE_OF or not all(_fits(source, result) for source in sources):
            self._loose.add(id(result))
        for source in sources:
            self._makers.setdefault(id(source), name)


def _fits(source: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a source lies on a result element by element, or spread out over it."""
    try:
        source.expand(result.shape)
        return True
    except RuntimeError:
        return False
