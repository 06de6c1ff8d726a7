"""Randomness of one's own: model code that draws numbers draws them from a private generator.

A torch function mode does it, which belongs to the thread; the default generator is left alone, and the
same code draws the same numbers each time. Code that *seeds* the default generator is no tensor operation;
what it does is undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["OwnRandom", "fills_randomly", "is_random", "own_random", "seeds_undone"]

_RANDOM_IN_PLACE = {"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "random_",
                    "geometric_"}  # fmt: skip
_RANDOM_CREATORS = {torch.randn, torch.rand, torch.randint, torch.randperm, torch.normal, torch.bernoulli,
                    torch.multinomial}  # fmt: skip


class OwnRandom(TorchFunctionMode):
    """Every random operation draws from ``generator``: the thread's default one is left alone."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random(func, kwargs) and kwargs.get("generator") is None and _is_on_cpu(args, kwargs):
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


def is_random(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function draws random numbers."""
    return func in _RANDOM_CREATORS or fills_randomly(func, kwargs)


def fills_randomly(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function overwrites a tensor with random values (``torch.nn.init``'s take a generator)."""
    in_init = getattr(func, "__module__", "") == "torch.nn.init"
    return "generator" in kwargs if in_init else getattr(func, "__name__", "") in _RANDOM_IN_PLACE


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return all(t.device.type == "cpu" for t in tensors) and str(kwargs.get("device") or "cpu") == "cpu"


def own_random(seed: int = 1) -> OwnRandom:
    """A mode with a fresh generator."""
    return OwnRandom(torch.Generator().manual_seed(seed))


@contextmanager
def seeds_undone() -> Iterator[None]:
    """The default generator of the CPU gets its state back if code within gave it another seed (reformer's
    hashing does). Numbers that other threads draw meanwhile are not drawn again otherwise.
    """
    seed, state = torch.initial_seed(), torch.get_rng_state()
    try:
        yield
    finally:
        if torch.initial_seed() != seed:
            torch.set_rng_state(state)
