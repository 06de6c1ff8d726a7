"""Which device, how many ranks it carries, which dtype and how many threads. Knows no model beyond its dtype.

What a command line or configuration asks for as text becomes a :class:`Device` here, or a refusal that
lists what there is. The figures behind the choices are in the files beside this one.
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple, Protocol

import torch

from shoal.device.cpu import CpuDevice, bfloat16_instructions, threads_per_rank, usable_cores
from shoal.device.cuda import AcceleratorDevice, accelerator_count
from shoal.device.memory import MemoryReport
from shoal.device.mps import MpsDevice, mps_is_available
from shoal.errors import ConfigError

__all__ = [
    "Device",
    "DtypeChoice",
    "available_devices",
    "check_ranks",
    "memory",
    "resolve_device",
    "resolve_dtype",
    "threads_per_rank",
]

_logger = logging.getLogger("shoal.device")

# Resident memory of a rank process that has imported torch and transformers, and nothing else (225 MB,
# torch 2.13 on Linux), doubled for what it needs to work.
_RANK_BYTES = 450 << 20

_NAME = re.compile(r"(auto|cpu|cuda|mps|xpu)(?::(\d+))?")


class Device(Protocol):
    """One device a rank computes on."""

    @property
    def kind(self) -> str:
        """cpu, cuda, mps or xpu."""
        ...

    @property
    def index(self) -> int | None:
        """Its number among the visible ones of its kind; None where there is only one."""
        ...

    @property
    def name(self) -> str:
        """As torch names it: ``cpu``, ``cuda:1``, ``mps``."""
        ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def visible_count(self) -> int:
        """Devices of this kind that this process can see."""
        ...

    @property
    def max_ranks(self) -> int | None:
        """The most ranks that start at this device; None: no bound."""
        ...

    def for_rank(self, rank: int) -> Device:
        """The device of rank ``rank`` of a group whose rank 0 has this one."""
        ...

    def activate(self) -> None:
        """Make it torch's current device of its kind in this process."""
        ...

    def description(self) -> str:
        """The hardware's name, for people."""
        ...

    def memory(self) -> MemoryReport: ...

    def synchronize(self) -> None:
        """Return once everything queued on it has run."""
        ...

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether its hardware computes in ``dtype``."""
        ...

    def random_state(self) -> torch.Tensor | None:
        """The state of its own random generator, uint8 on the CPU; None if it has none beside the CPU's."""
        ...

    def set_random_state(self, state: torch.Tensor) -> None:
        """Go on drawing from a state of :meth:`random_state`."""
        ...


class DtypeChoice(NamedTuple):
    """A dtype by its torch name, and one line that says why."""

    name: str
    reason: str


def available_devices() -> list[str]:
    """The names of the devices this process can use, the CPU first."""
    names = ["cpu"]
    names += [f"{kind}:{index}" for kind in ("cuda", "xpu") for index in range(accelerator_count(kind))]
    return names + (["mps"] if mps_is_available() else [])


def memory(device: Device) -> MemoryReport:
    """A device's bytes at this instant."""
    return device.memory()


def resolve_device(requested: str) -> Device:
    """The device a name stands for.

    Args:
        requested: ``auto`` (CUDA if there is any, else MPS, else the CPU), or a kind (``cpu``, ``cuda``,
            ``mps``, ``xpu``), with an index after a colon or without (then 0).

    Raises:
        ConfigError: no such name, or no such device here; the message lists what there is.
    """
    match = _NAME.fullmatch(requested.strip().lower())
    kind, index = (match[1], match[2]) if match else ("", None)
    if kind == "auto" and index is None:
        kind = "cuda" if accelerator_count("cuda") else "mps" if mps_is_available() else "cpu"
    number = int(index or 0)
    if kind == "cpu" and number == 0:
        return CpuDevice()
    if kind == "mps" and number == 0 and mps_is_available():
        return MpsDevice()
    if kind in ("cuda", "xpu") and number < accelerator_count(kind):
        return AcceleratorDevice(kind, number)
    there = ", ".join(available_devices())
    problem = "there is no such device here" if match else "no such device name"
    raise ConfigError(f"device: {problem}: {requested!r}; there is: auto, {there}", field="device")


def check_ranks(device: Device, tensor_parallel_size: int) -> None:
    """Refuse more ranks than the device carries; warn once where they would only share it.

    Call it once, where an engine is configured, not on every rank.

    Raises:
        ConfigError: more ranks than devices (CUDA, XPU), more than one on MPS, or on a CPU more than its
            free memory holds the bare processes of.
    """
    limit = device.max_ranks
    if limit is not None and tensor_parallel_size > limit:
        there = f"{device.visible_count} visible" if device.kind != "mps" else "one such device"
        raise ConfigError(
            f"tensor_parallel_size: {tensor_parallel_size} ranks do not fit on {device.kind}: "
            f"there is {there}"
            + (f", and counting starts at {device.name}" if device.index else "")
            + f"; pass at most {limit}",
            field="tensor_parallel_size",
        )
    if device.kind == "cpu":
        _check_cpu_ranks(device, tensor_parallel_size)


def _check_cpu_ranks(device: Device, tensor_parallel_size: int) -> None:
    fitting = max(1, device.memory().free // _RANK_BYTES)
    if tensor_parallel_size > fitting:
        raise ConfigError(
            f"tensor_parallel_size: {tensor_parallel_size} ranks do not fit on cpu: each takes "
            f"{_RANK_BYTES >> 20} MiB before any weight; pass at most {fitting}",
            field="tensor_parallel_size",
        )
    cores = usable_cores()
    if tensor_parallel_size > cores:
        _logger.warning(
            "%d ranks share %d CPU core%s: ranks wait for each other, so this is slower than %d",
            tensor_parallel_size, cores, "" if cores == 1 else "s", cores,
        )  # fmt: skip


def resolve_dtype(
    requested: str, device: Device, model_dtype: torch.dtype | str | None = None
) -> DtypeChoice:
    """What to compute in.

    ``auto`` on a CPU is float32, unless the model is bfloat16 and the CPU multiplies bfloat16 matrices
    (AVX512-BF16 or AMX): without those, torch's bfloat16 products were measured at 0.9 GFLOP/s against
    156 in float32. Elsewhere it is the model's own dtype, but for a float32 model on CUDA and XPU, which
    becomes bfloat16 (float16 where the hardware lacks bfloat16), as vLLM's ``auto`` halves it too.

    Args:
        requested: auto, float32, bfloat16 or float16.
        device: where it computes.
        model_dtype: the checkpoint's, as a torch dtype or its name; None counts as float32.

    Raises:
        ConfigError: the device cannot compute in the dtype asked for.
    """
    if requested == "auto":
        own = _dtype_name(model_dtype)
        return _auto_on_cpu(own) if device.kind == "cpu" else _auto_elsewhere(own, device)
    if not device.supports(getattr(torch, requested)):
        raise ConfigError(f"dtype: {device.name} cannot compute in {requested}; pass auto", field="dtype")
    if device.kind == "cpu" and requested != "float32" and not _fast_on_cpu(requested):
        return DtypeChoice(requested, f"{requested}: as asked for, though float32 is faster on this CPU")
    return DtypeChoice(requested, f"{requested}: as asked for")


def _dtype_name(dtype: torch.dtype | str | None) -> str:
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


def _fast_on_cpu(name: str) -> bool:
    return name == "bfloat16" and bfloat16_instructions() is not None


def _auto_on_cpu(own: str) -> DtypeChoice:
    if own == "float32":
        return DtypeChoice("float32", "float32: the model's own dtype")
    if own != "bfloat16":
        return DtypeChoice("float32", f"float32: the model is {own}, which is slow on a CPU")
    instructions = bfloat16_instructions()
    if instructions is None:
        return DtypeChoice(
            "float32", "float32: the model is bfloat16, which is slow on a CPU without AVX512-BF16 or AMX"
        )
    return DtypeChoice("bfloat16", f"bfloat16: the model's own dtype, and this CPU has {instructions}")


def _auto_elsewhere(own: str, device: Device) -> DtypeChoice:
    half = "bfloat16" if device.supports(torch.bfloat16) else "float16"
    if own == "float32" and device.kind != "mps":
        return DtypeChoice(
            half, f"{half}: the model is float32, halved on {device.kind} for speed and memory"
        )
    if own in ("float32", "float16") or own == half:
        return DtypeChoice(own, f"{own}: the model's own dtype")
    if own == "bfloat16":
        return DtypeChoice(
            "float16", f"float16: the model is bfloat16, which {device.name} cannot compute in"
        )
    return DtypeChoice("float32", f"float32: the model is {own}, which is not a dtype to compute in here")
