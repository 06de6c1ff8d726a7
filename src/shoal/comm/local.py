"""The group of one: collectives that have nobody to talk to. Knows no transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["LocalComm"]


class LocalComm:
    """A :class:`shoal.comm.base.Comm` of size 1; every collective hands its input back."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing is held."""
