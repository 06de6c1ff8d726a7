"""Finds out by numbers how a tensor came from others: which features, which sum, which norm, which
activation. Knows no layer.

Everything here compares float32 results of random input, so that what agrees does so for no other reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "ACTIVATIONS",
    "NormLook",
    "find_activation",
    "find_columns",
    "find_gate",
    "find_norm",
    "find_sum",
    "is_close",
]

_CLOSE = 2e-5  # largest relative error of two right computations
_MOST_TERMS = 3
_BLOCK = 2048  # columns compared at once

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""By the names that :data:`shoal.cpu_kernels.activation.ACTIVATIONS` has."""


def is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two tensors are the same but for rounding."""
    return got.shape == want.shape and _error(got, want) < _CLOSE


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def find_columns(
    target: torch.Tensor, sources: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Where every column of ``target`` [T, N] is among those of the sources, but for a factor.

    Returns:
        (source, column, factor), each [N]; or None where a column is nowhere.
    """
    if not sources:
        return None
    origin = torch.cat([torch.full((s.shape[1],), i) for i, s in enumerate(sources)])
    column = torch.cat([torch.arange(s.shape[1]) for s in sources])
    pool = torch.cat(list(sources), 1)
    sizes, own = pool.norm(dim=0), target.norm(dim=0)
    if not bool((own > 0).all()):
        return None
    unit = pool / sizes.clamp_min(1e-30)
    picks, likeness = [], []
    for start in range(0, target.shape[1], _BLOCK):
        block = target[:, start : start + _BLOCK]
        alike = (block / block.norm(dim=0)).T @ unit
        best, pick = alike.abs().max(1)
        picks.append(pick)
        likeness.append(best)
    pick = torch.cat(picks)
    if bool((torch.cat(likeness) < 1 - 1e-5).any()):
        return None
    chosen = pool[:, pick]
    factors = (target * chosen).sum(0) / chosen.square().sum(0)
    if not is_close(chosen * factors, target):
        return None
    return origin[pick], column[pick], torch.where((factors - 1).abs() < 1e-5, 1.0, factors)


def find_sum(target: torch.Tensor, known: Mapping[str, torch.Tensor]) -> tuple[tuple[str, float], ...] | None:
    """``target`` as the sum of as few known values as possible, each times a factor; None: it is none."""
    fitting = {name: value for name, value in known.items() if value.shape == target.shape}
    for size in range(1, _MOST_TERMS + 1):
        for names in itertools.combinations(fitting, size):
            columns = torch.stack([fitting[name].flatten().double() for name in names], 1)
            factors = torch.linalg.lstsq(columns, target.flatten().double()[:, None]).solution[:, 0]
            if is_close((columns @ factors).float(), target.flatten()) and bool((factors.abs() > 1e-6).all()):
                return tuple(zip(names, (_rounded(float(f)) for f in factors), strict=True))
    return None


def _rounded(factor: float) -> float:
    return 1.0 if abs(factor - 1) < 1e-5 else factor


@dataclass(frozen=True, slots=True)
class NormLook:
    """How a module norms the last dimension of what it is given."""

    width: int
    is_centred: bool
    adds_one: bool
    has_weight: bool
    has_bias: bool
    eps: float


def find_norm(module: nn.Module, source: torch.Tensor, out: torch.Tensor) -> NormLook | None:
    """The RMSNorm or LayerNorm that a module computed, or None.

    Args:
        source, out: as the module was given and gave them, the normed features last.
    """
    parameters = dict(module.named_parameters(recurse=False))
    width = source.shape[-1]
    of_features = all(p.shape == (width,) for p in parameters.values())
    if source.shape != out.shape or not of_features or not parameters.keys() <= {"weight", "bias"}:
        return None
    x, want = source.reshape(-1, width).double(), out.reshape(-1, width).double()
    weight, bias = (
        p.detach().double() if (p := parameters.get(name)) is not None else None
        for name in ("weight", "bias")
    )
    best: tuple[float, NormLook | None] = (_CLOSE, None)
    for is_centred, adds_one, eps in itertools.product((False, True), (False, True), _eps_of(module)):
        if adds_one and weight is None:
            continue
        away = x - x.mean(-1, keepdim=True) if is_centred else x
        got = away * torch.rsqrt(away.square().mean(-1, keepdim=True) + eps)
        if weight is not None:
            got = got * (1 + weight if adds_one else weight)
        error = _error(got if bias is None else got + bias, want)
        if error < best[0]:
            look = NormLook(width, is_centred, adds_one, weight is not None, bias is not None, eps)
            best = error, look
    return best[1]


def _eps_of(module: nn.Module) -> list[float]:
    """What may be the eps: small numbers that the module has, or a usual one."""
    own = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]
    return own or [1e-5, 1e-6, 1e-12, torch.finfo(torch.float32).eps]


def find_activation(source: torch.Tensor, out: torch.Tensor) -> str | None:
    """The activation that makes ``out`` of ``source``."""
    return next((name for name, act in ACTIVATIONS.items() if is_close(act(source), out)), None)


def find_gate(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> str | None:
    """The activation with which ``out`` is activation(gate) * up."""
    if not gate.shape == up.shape == out.shape:
        return None
    return next((name for name, act in ACTIVATIONS.items() if is_close(act(gate) * up, out)), None)
