"""Apple's GPU. There is one, and it shares the host's memory. Knows no model.

Run in this project's tests with a stand-in for ``torch.mps`` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.device.memory import MemoryReport, mps_memory

__all__ = ["MpsDevice", "mps_is_available"]


def mps_is_available() -> bool:
    """Whether this torch can compute on an Apple GPU here."""
    return torch.backends.mps.is_available()


@dataclass(frozen=True, slots=True)
class MpsDevice:
    """The one Apple GPU."""

    kind: str = "mps"
    index: int | None = 0

    @property
    def name(self) -> str:
        return "mps"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("mps")

    @property
    def visible_count(self) -> int:
        return 1

    @property
    def max_ranks(self) -> int | None:
        return 1

    def for_rank(self, rank: int) -> MpsDevice:
        return self

    def activate(self) -> None:
        return None

    def description(self) -> str:
        return "Apple GPU"

    def memory(self) -> MemoryReport:
        return mps_memory()

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def supports(self, dtype: torch.dtype) -> bool:
        """Metal has no float64; bfloat16 came with macOS 14 (torch's own MPS checks say so)."""
        if dtype is torch.bfloat16:
            return torch.backends.mps.is_macos_or_newer(14, 0)
        return dtype is not torch.float64

    def random_state(self) -> torch.Tensor | None:
        return torch.mps.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.mps.set_rng_state(state)
