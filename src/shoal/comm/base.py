"""The collectives a sharded model needs, and what each promises. Knows no transport.

Every rank of a group calls the same collectives in the same order. Each has a deadline: a peer that
does not come raises :class:`shoal.errors.RankError` instead of waiting for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

__all__ = ["Comm", "TimedComm"]


class Comm(Protocol):
    """One rank's end of a group."""

    @property
    def rank(self) -> int:
        """This rank, 0 to ``size - 1``."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, the same bits on every rank. May reuse ``tensor``'s memory."""
        ...

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """The ranks' tensors concatenated along ``dim``; rank r brings ``sizes[r]`` there (0 is allowed)."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """``source``'s values on every rank; shapes agree beforehand. May write into ``tensor``."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def close(self) -> None:
        """Release what the group holds. Further calls are errors."""
        ...


@runtime_checkable
class TimedComm(Comm, Protocol):
    """A group whose peers can be late."""

    def set_timeout(self, timeout_s: float) -> None:
        """How long collectives wait for their peers from now on."""
        ...
