"""Parameters without a layer of their own, of which a rank holds the part that a product sums over.

A module's own code multiplies by such a parameter, or by a view of it (``self.down_proj[expert]``). The
owner hands it out marked; the mark goes along through views, and the first product with another tensor
is summed over ranks. Knows no plan and no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from shoal.errors import PlanError
from shoal.shard.link import Link
from shoal.shard.mixing import Mixed

__all__ = ["FactorOwner", "RowFactor"]

# Operations that sum over a dimension their operands share.
_PRODUCTS = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "einsum",
    "tensordot", "conv1d", "conv2d", "grouped_mm", "_grouped_mm", "grouped_mm_fallback", "chain_matmul",
}  # fmt: skip
_TERM_FIRST = {"addmm", "addbmm", "baddbmm", "addmv"}  # ``term + a @ b``
_BIAS_THIRD = {"linear": 0, "conv1d": 1, "conv2d": 2}  # dimensions of the output behind the bias's own
_CONVERSIONS = {"to", "type_as", "expand_as", "view_as", "reshape_as"}  # the second tensor gives no values
_WRITES = {"copy_", "set_", "__set__", "__setitem__"}
_FRESH = {  # what they give is no part of the factor
    "equal", "allclose", "__hash__", "__repr__", "__format__",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided",
}  # fmt: skip


class RowFactor(torch.Tensor):
    """A rank's part of a factor that a product sums over.

    Shares the memory of the tensor it was made of. What is made of it alone, or picked out of it by
    integers, is one too; a product with another floating-point tensor is computed on plain tensors and
    summed over ranks. Anything else it could meet another tensor in is refused: what that would mean for
    a part is not known.
    """

    link: Link

    @classmethod
    def of(cls, tensor: torch.Tensor, link: Link) -> RowFactor:
        """``tensor``, marked."""
        marked = tensor.as_subclass(cls)
        marked.link = link
        return marked

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        marked = [tensor for tensor in tensors if isinstance(tensor, RowFactor)]
        name, link = getattr(func, "__name__", ""), marked[0].link
        has_others = any(_has_values(tensor) for tensor in tensors)
        with torch._C.DisableTorchFunctionSubclass():
            plain_args, plain_kwargs = _plain(args), _plain(kwargs)
            if name in _FRESH or (name in _WRITES and args[0] is marked[0]):
                return func(*plain_args, **plain_kwargs)
            is_product = name in _PRODUCTS or name in _TERM_FIRST
            if (has_others and name not in _CONVERSIONS) or (is_product and len(marked) > 1):
                if not is_product or len(marked) > 1 or "out" in kwargs:
                    raise PlanError(f"a parameter split along the features that are summed meets {name!r}")
                if _term(name, args, kwargs) is marked[0]:
                    raise PlanError(
                        f"a parameter split along the features that are summed is added in {name}"
                    )
                return _summed(func, name, plain_args, plain_kwargs, link)
            result = func(*plain_args, **plain_kwargs)
            return result if has_others and args[0] is not marked[0] else _marked(result, link)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that a factor may be multiplied by, and not an index or a number."""
    if isinstance(tensor, RowFactor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return (tensor.is_floating_point() or tensor.is_complex()) and tensor.dim() > 0


def _plain(value: Any) -> Any:
    if isinstance(value, RowFactor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(_plain(item) for item in value)
    return value


def _marked(value: Any, link: Link) -> Any:
    if isinstance(value, torch.Tensor):
        return RowFactor.of(value, link) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = [_marked(item, link) for item in value]
        return type(value)(items) if type(value) in (tuple, list) else tuple(items)
    return value


def _term(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that an operation adds to its product, if it does."""
    if name in _TERM_FIRST:
        return kwargs.get("input", args[0] if args else None)
    if name in _BIAS_THIRD:
        return kwargs.get("bias", args[2] if len(args) > 2 else None)
    return None


def _summed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], link: Link) -> torch.Tensor:
    """The product summed over ranks, plus the term that the operation adds, once."""
    term: torch.Tensor | None = _term(name, args, kwargs)
    if term is None:
        return link.comm.all_reduce(func(*args, **kwargs))
    if name in _BIAS_THIRD:
        if "bias" in kwargs:
            kwargs = {**kwargs, "bias": None}
        else:
            args = (*args[:2], None, *args[3:])
        product = link.comm.all_reduce(func(*args, **kwargs))
        return product + term.reshape(-1, *(1,) * _BIAS_THIRD[name])
    nothing = term.new_zeros(())
    if "input" in kwargs:
        kwargs = {**kwargs, "input": nothing}
    else:
        args = (nothing, *args[1:])
    return link.comm.all_reduce(func(*args, **kwargs)) + term * float(kwargs.get("beta", 1))


class FactorOwner(Mixed):
    """A module that hands out some of its own parameters marked.

    The parameters themselves stay plain, so that loading, moving, copying and counting them goes on as
    before; only the attribute's value, as the module's code reads it, is marked.
    """

    row_factors: frozenset[str]  # names of the parameters

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name in self.__dict__.get("row_factors", ()) and isinstance(value, torch.Tensor):
            return RowFactor.of(value, self.link)
        return value
