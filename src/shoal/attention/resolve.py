"""Which attention kernel computes, and why. Knows the kernels' names and needs, not their code.

The rule has two halves. A name the user gives is taken as it is or refused with the reason, never
replaced. Without one, the device's candidates are tried in order: what this machine cannot run, or what
does not compute what the reference computes (the self-check, which the caller brings), is passed over,
and one line says so. A new kernel is one line in :data:`CANDIDATES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

import torch

from shoal.device.base import Device, available_devices
from shoal.errors import ConfigError

__all__ = [
    "CANDIDATES",
    "CPU_PAGED",
    "METAL_FLASH",
    "Candidate",
    "Choice",
    "first_passing",
    "is_mps",
    "resolve",
]

_logger = logging.getLogger("shoal.attention")

CPU_PAGED = "cpu_paged"
METAL_FLASH = "kernels-community/metal-flash-sdpa@223ca3350d7ba32ecf19341ff2cbb8c43fa47d62"

# 100 GSM8K questions, Qwen2.5-0.5B-Instruct, MPS, fp16: huggingface/transformers pull request 45974.
_METAL_GAIN = "149.3 s at 158 tok/s with sdpa against 89.8 s at 256 tok/s with it"

SelfCheck = Callable[[str], str | None]
"""Given a kernel's name: None if it computes what the reference does, else what is wrong."""

PackageCheck = Callable[[str], bool]
"""Whether a package can be imported."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel and what it needs."""

    name: str
    devices: tuple[str, ...]
    package: str | None = None  # must be importable
    automatic: bool = True  # False: only on request


CANDIDATES: tuple[Candidate, ...] = (
    Candidate(METAL_FLASH, ("mps",), package="kernels"),
    Candidate(CPU_PAGED, ("cpu",), package="numba"),
    Candidate("sdpa", ("cpu", "cuda", "mps", "xpu")),
    Candidate("eager", ("cpu", "cuda", "mps", "xpu"), automatic=False),
)
"""In the order in which a device's kernels are tried."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel taken, and what there is to say about it."""

    name: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()  # (name, why), in the order tried
    warnings: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()  # for the log at info


def is_mps(device: str | int | torch.device | Device) -> bool:
    """Whether attention will run on Apple's GPU.

    A device string that begins with ``mps``, or ``auto`` where MPS is there and CUDA is not. An integer
    is not MPS: integers number CUDA devices.
    """
    return _kind(device) == "mps"


def first_passing(
    names: Iterable[str], self_check: SelfCheck
) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """The first kernel that passes its numeric self-check.

    Returns:
        its name, or None if none passes; and every kernel before it with what was wrong.
    """
    failed: list[tuple[str, str]] = []
    for name in names:
        problem = self_check(name)
        if problem is None:
            return name, tuple(failed)
        failed.append((name, problem))
    return None, tuple(failed)


def resolve(
    requested: str | None,
    device: str | int | torch.device | Device,
    self_check: SelfCheck | None = None,
    *,
    candidates: Iterable[Candidate] = CANDIDATES,
    has_package: PackageCheck | None = None,
) -> Choice:
    """Choose the kernel, and log the choice: its warnings once each, the rest at info.

    Args:
        requested: the user's choice, or None for the best of the device.
        device: a :class:`Device`, or its name as a user writes it (``auto`` is looked up).
        self_check: run on each candidate until one passes; None: none is run.
        candidates: the kernels of this build.
        has_package: whether a package can be imported; None: ask Python.

    Raises:
        ConfigError: the kernel asked for is not in this build, not for this device, lacks its package or
            fails its self-check; or no candidate passes. ``field`` is ``attn_implementation``.
    """
    kind = _kind(device)
    has_package = _can_import if has_package is None else has_package
    check = _always_right if self_check is None else self_check
    here = [candidate for candidate in candidates if kind in candidate.devices]
    if requested is not None:
        choice = _explicit(requested, kind, here, check, has_package)
    else:
        choice = _automatic(kind, here, check, has_package)
    for warning in choice.warnings:
        _logger.warning("%s", warning)
    for line in choice.lines:
        _logger.info("%s", line)
    return choice


def _explicit(
    requested: str, kind: str, here: list[Candidate], check: SelfCheck, has_package: PackageCheck
) -> Choice:
    candidate = next((candidate for candidate in here if candidate.name == requested), None)
    if candidate is None:
        there = ", ".join(candidate.name for candidate in here)
        raise _refusal(f"there is no {requested!r} on {kind}; there is: {there}")
    problem = _missing(candidate, has_package) or check(requested)
    if problem is not None:
        raise _refusal(f"{requested!r} was asked for but cannot be used: {problem}")
    return Choice(requested, "as asked for", lines=(f"attention: {requested}, as asked for",))


def _automatic(kind: str, here: list[Candidate], check: SelfCheck, has_package: PackageCheck) -> Choice:
    automatic = [candidate for candidate in here if candidate.automatic]
    missing = {candidate.name: _missing(candidate, has_package) for candidate in automatic}
    name, rejected = first_passing(missing, lambda name: missing[name] or check(name))
    if name is None:
        told = "; ".join(f"{rejected_name}: {why}" for rejected_name, why in rejected)
        raise _refusal(f"no kernel works on {kind}: {told}")
    reason = f"the first of {kind}'s kernels that works here"
    lines = [f"attention: {name}, {reason}"]
    lines += [f"attention: not {rejected_name}: {why}" for rejected_name, why in rejected]
    if missing.get(METAL_FLASH):
        lines.append(f"attention: `pip install kernels` is faster ({_METAL_GAIN})")
    return Choice(name, reason, rejected, _warnings(name), tuple(lines))


def _warnings(name: str) -> tuple[str, ...]:
    if name != METAL_FLASH:
        return ()
    return (f"attention: MPS computes with {name}. Pass `--attn-implementation sdpa` to opt out.",)


def _missing(candidate: Candidate, has_package: PackageCheck) -> str | None:
    if candidate.package is None or has_package(candidate.package):
        return None
    return f"the package {candidate.package!r} is not installed (pip install {candidate.package})"


def _can_import(package: str) -> bool:
    try:
        spec = import_module(package).__spec__
    except ImportError:
        return False
    # A folder that happens to have this name imports too, as a namespace without a file of its own.
    return spec is None or spec.origin is not None


def _always_right(name: str) -> None:
    return None


def _kind(device: str | int | torch.device | Device) -> str:
    """cpu, cuda, mps or xpu."""
    if isinstance(device, int):
        return "cuda"
    if not isinstance(device, (str, torch.device)):
        return device.kind
    kind = str(device).strip().lower().partition(":")[0]
    if kind != "auto":
        return kind
    there = {name.partition(":")[0] for name in available_devices()}
    return next(kind for kind in ("cuda", "mps", "cpu") if kind in there)


def _refusal(message: str) -> ConfigError:
    return ConfigError(f"attn_implementation: {message}", field="attn_implementation")
