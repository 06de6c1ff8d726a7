"""Lets gradients through code that computes its own, or none. Knows no model.

A ``torch.autograd.Function`` of a model's own whose ``backward`` refuses (reversible layers that are only
made for training) is run as ordinary code instead, so that autograd follows its ``forward``; and code
under ``no_grad`` is followed as well.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from shoal.plan.skeleton import building

__all__ = ["inlined", "refusing_function"]


class _PlainContext:
    """What ``forward`` of a Function keeps for ``backward``: nothing is done with it."""

    def __init__(self) -> None:
        self.saved_tensors: tuple[Any, ...] = ()
        self.needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None:
        """Only autograd, which is not asked, needs to know."""

    mark_non_differentiable = mark_dirty

    def set_materialize_grads(self, value: bool) -> None:
        """Only ``backward``, which is not run, needs to know."""


class _KeepGradients(TorchFunctionMode):
    """Code cannot switch gradients off."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            return func(True)
        return func(*args, **(kwargs or {}))


def refusing_function(error: BaseException) -> type[Function] | None:
    """The Function of whose ``backward`` an error came, if it came of one."""
    codes = []
    trace = error.__traceback__
    while trace is not None:
        codes.append(trace.tb_frame.f_code)
        trace = trace.tb_next
    for function in _subclasses(Function):
        backward = getattr(function.backward, "__wrapped__", function.backward)
        if isinstance(backward, types.FunctionType) and backward.__code__ in codes:
            return function
    return None


def _subclasses(function: type[Function]) -> Iterator[type[Function]]:
    for subclass in function.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


@contextmanager
def inlined(functions: Iterable[type[Function]]) -> Iterator[None]:
    """Within, these Functions are ordinary code and ``no_grad`` does nothing (in this thread).

    The classes are the process's: what builds or plans a model elsewhere waits meanwhile.
    """
    with building(), ExitStack() as undo:
        for function in functions:
            had_own = "apply" in vars(function)
            previous = vars(function).get("apply")
            if had_own:
                undo.callback(setattr, function, "apply", previous)
            else:
                undo.callback(delattr, function, "apply")
            setattr(function, "apply", _plain_apply(function))  # noqa: B010  (mypy: a method)
        undo.enter_context(_KeepGradients())
        yield


def _plain_apply(function: type[Function]) -> staticmethod[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        return function.forward(_PlainContext(), *args, **kwargs)

    return staticmethod(apply)
