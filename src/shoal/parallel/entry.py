"""Where the program calls into a sharded model: the outermost call goes to the group, calls inside it do
not. Knows no process.

Every module that holds something split gets a forward of its own (an attribute of the module; its class
stays). So it does not matter through which door a call comes: the model, its encoder, a single layer, with
hooks or by ``forward`` itself.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from shoal.errors import UsageError
from shoal.parallel.whole import advice, partial_modules
from shoal.plan.slices import direct_tensors
from shoal.plan.types import Plan

__all__ = ["Calls", "Group", "adopt", "hook_keys", "state_names"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Group(Protocol):
    """The ranks of one model, as the outermost call sees them."""

    def run(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run module ``name``'s forward on every rank; rank 0's result."""
        ...


class Calls:
    """Tells outermost calls from those inside them. One call at a time: other threads wait."""

    def __init__(self) -> None:
        self.group: Group | None = None  # None: a member, which is told what to run, and is always inside
        self._lock = threading.Lock()
        self._thread: int | None = None
        self.partial: dict[str, str] = {}

    def call(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module's forward, on every rank if nobody does so yet."""
        group = self.group
        if group is None or self._thread == threading.get_ident():
            return forward(*args, **kwargs)
        if name in self.partial:
            raise UsageError(
                f"{name} holds a part of what it held before the model was parallelized; "
                f"{advice(self.partial, name)}"
            )
        with self._lock:
            self._thread = threading.get_ident()
            try:
                return group.run(name, forward, args, kwargs)
            finally:
                self._thread = None


def state_names(module: nn.Module) -> frozenset[str]:
    """Names of output fields that are state: the module's forward takes them back under the same name."""
    return frozenset(inspect.signature(type(module).forward).parameters)


def hook_keys(model: nn.Module) -> dict[tuple[int, str], set[int]]:
    """The forward hooks there are, by module and kind."""
    return {(id(module), kind): set(getattr(module, kind)) for module in model.modules() for kind in _HOOKS}


def adopt(
    model: nn.Module, plan: Plan, calls: Calls, hooks_before: Mapping[tuple[int, str], set[int]]
) -> None:
    """Send the outermost calls of a sharded model to ``calls``.

    Hooks that sharding added (an argument's slice, a late sum) move into the forward: they belong to a
    rank's work, and the program's own hooks see whole arguments and results.

    Args:
        hooks_before: :func:`hook_keys` from before the model was sharded.
    """
    calls.partial = partial_modules(model, plan)
    split = {name.rpartition(".")[0] for name, _, _ in direct_tensors(model) if _is_split(plan, name)}
    for name, module in model.named_modules():
        own = [_taken(module, kind, hooks_before[id(module), kind]) for kind in _HOOKS]
        if any(own) or any(_is_around(name, owner) for owner in split):
            module.forward = _forward(name, module, calls, *own)


def _is_split(plan: Plan, name: str) -> bool:
    found = plan.split_of(name)
    return found is not None and found.op != "replicate"


def _is_around(name: str, inner: str) -> bool:
    return not name or inner == name or inner.startswith(f"{name}.")


def _taken(module: nn.Module, kind: str, before: set[int]) -> list[tuple[Any, bool]]:
    """Take the hooks that are not in ``before`` off the module: (hook, whether it wants keywords too)."""
    hooks: dict[int, Any] = getattr(module, kind)
    with_kwargs: dict[int, Any] = getattr(module, f"{kind}_with_kwargs")
    new = [key for key in hooks if key not in before]
    return [(hooks.pop(key), bool(with_kwargs.pop(key, False))) for key in new]


def _forward(
    name: str,
    module: nn.Module,
    calls: Calls,
    pre_hooks: list[tuple[Any, bool]],
    post_hooks: list[tuple[Any, bool]],
) -> Callable[..., Any]:
    """The module's forward with the hooks sharding added, announced to the group where it is outermost."""
    # Nothing here may hold the module: a model that is dropped is to go at once, and its ranks with it.
    this = weakref.ref(module)
    own = vars(module).get("forward")
    plain = own if own is not None else type(module).forward

    def rank_forward(*args: Any, **kwargs: Any) -> Any:
        module = this()
        assert module is not None
        for hook, with_kwargs in pre_hooks:
            args, kwargs = _before(hook, with_kwargs, module, args, kwargs)
        output = plain(*args, **kwargs) if own is not None else plain(module, *args, **kwargs)
        for hook, with_kwargs in post_hooks:
            changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
            output = output if changed is None else changed
        return output

    def forward(*args: Any, **kwargs: Any) -> Any:
        return calls.call(name, rank_forward, args, kwargs)

    functools.update_wrapper(forward, plain)
    del forward.__wrapped__  # type: ignore[attr-defined]  # it may hold the module
    forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]  # generate() asks
    return forward


def _before(
    hook: Any, with_kwargs: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if with_kwargs:
        changed = hook(module, args, kwargs)
        return (args, kwargs) if changed is None else changed
    changed = hook(module, args)
    if changed is None:
        return args, kwargs
    return (changed if isinstance(changed, tuple) else (changed,)), kwargs
