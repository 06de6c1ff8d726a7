"""CUDA devices, and Intel's XPU, whose torch module has the same functions. Knows no model.

Run in this project's tests with stand-ins for ``torch.cuda`` and ``torch.xpu`` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shoal.device.memory import MemoryReport, accelerator_memory

__all__ = ["AcceleratorDevice", "accelerator_count"]


def accelerator_count(kind: str) -> int:
    """Visible devices of a kind ("cuda" or "xpu"); 0 without hardware, driver or support in this torch."""
    backend = _backend(kind)
    return int(backend.device_count()) if backend.is_available() else 0


def _backend(kind: str) -> Any:
    return torch.cuda if kind == "cuda" else torch.xpu


@dataclass(frozen=True, slots=True)
class AcceleratorDevice:
    """One device with memory of its own."""

    kind: str  # "cuda" or "xpu"
    index: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index}"

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index)

    @property
    def visible_count(self) -> int:
        return accelerator_count(self.kind)

    @property
    def max_ranks(self) -> int | None:
        """Devices from this one on: rank r takes the r-th of them."""
        return self.visible_count - self.index

    def for_rank(self, rank: int) -> AcceleratorDevice:
        return AcceleratorDevice(self.kind, self.index + rank)

    def activate(self) -> None:
        _backend(self.kind).set_device(self.index)

    def description(self) -> str:
        return str(_backend(self.kind).get_device_name(self.index))

    def memory(self) -> MemoryReport:
        return accelerator_memory(self.index, _backend(self.kind))

    def synchronize(self) -> None:
        _backend(self.kind).synchronize(self.index)

    def supports(self, dtype: torch.dtype) -> bool:
        """bfloat16 in hardware needs compute capability 8.0 (CUDA C++ Programming Guide); XPUs have it."""
        if dtype is torch.bfloat16 and self.kind == "cuda":
            return bool(torch.cuda.get_device_capability(self.index) >= (8, 0)) or _is_hip()
        return True

    def random_state(self) -> torch.Tensor | None:
        state: torch.Tensor = _backend(self.kind).get_rng_state(self.index)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        _backend(self.kind).set_rng_state(state, self.index)


def _is_hip() -> bool:
    return torch.version.hip is not None  # AMD's capabilities are numbered otherwise
