"""Ranks as threads of one process, for proofs and tests. Knows neither models nor plans.

Tensors are handed over by reference. A collective is two barrier waits: after the first everyone has
put its tensor down, after the second everyone has read the others'. Whoever fails breaks the barrier,
which releases the rest with :class:`RankError`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import torch

from shoal.errors import RankError

__all__ = ["SimulatedComm", "SimulatedGroup", "run_ranks"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What one rank puts down: what it believes is going on, and its tensor."""

    collective: str
    detail: tuple[object, ...]
    tensor: torch.Tensor | None


class SimulatedGroup:
    """What the threads of a group share.

    Args:
        size: number of ranks.
        timeout_s: seconds a collective waits for the other ranks.
    """

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._parcels: list[_Parcel | None] = [None] * size
        self._barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self._failure: str | None = None

    def comm(self, rank: int) -> SimulatedComm:
        """The end of one rank."""
        return SimulatedComm(self, rank)

    def fail(self, rank: int, reason: str) -> None:
        """Release every waiting rank; the first reason given is the one they report."""
        with self._lock:
            self._failure = self._failure or f"rank {rank}: {reason}"
        self._barrier.abort()

    def exchange(self, rank: int, parcel: _Parcel) -> list[torch.Tensor | None]:
        """Every rank's tensor, in rank order, once all have called.

        Raises:
            RankError: another rank failed, did not come in time, or is in a different collective.
        """
        self._parcels[rank] = parcel
        self._wait(rank)
        parcels = [entry for entry in self._parcels if entry is not None]
        for other, entry in enumerate(parcels):
            if (entry.collective, entry.detail) != (parcel.collective, parcel.detail):
                reason = f"{parcel.collective}{parcel.detail} meets {entry.collective}{entry.detail}"
                self.fail(rank, f"{reason} of rank {other}")
                raise RankError(f"collectives differ: {reason} of rank {other}", rank=rank)
        self._wait(rank)
        return [entry.tensor for entry in parcels]

    def _wait(self, rank: int) -> None:
        try:
            self._barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            reason = self._failure or f"a peer did not come within {self.timeout_s} s"
            raise RankError(f"rank {rank} was released: {reason}", rank=rank) from None


class SimulatedComm:
    """A :class:`shoal.comm.base.Comm` whose peers are threads."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size
        self._is_closed = False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        # Summed in rank order by everyone: the same bits everywhere.
        return reduce(torch.add, self._exchange("all_reduce", (tuple(tensor.shape),), tensor))

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        if tensor.shape[dim] != sizes[self.rank]:
            message = f"rank {self.rank} brings {tensor.shape[dim]}, promised {sizes[self.rank]}"
            self._group.fail(self.rank, message)
            raise RankError(message, rank=self.rank)
        return torch.cat(self._exchange("all_gather", (tuple(sizes), dim), tensor), dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._exchange("broadcast", (tuple(tensor.shape), source), tensor)[source].clone()

    def barrier(self) -> None:
        self._exchange("barrier", (), None)

    def close(self) -> None:
        self._is_closed = True

    def _exchange(
        self, collective: str, detail: tuple[object, ...], tensor: torch.Tensor | None
    ) -> list[torch.Tensor]:
        if self._is_closed:
            raise RankError(f"rank {self.rank}: {collective} after close()", rank=self.rank)
        parcels = self._group.exchange(self.rank, _Parcel(collective, detail, tensor))
        return [entry for entry in parcels if entry is not None]


def run_ranks(
    size: int, function: Callable[[SimulatedComm], Result], timeout_s: float = 60.0
) -> list[Result]:
    """Run ``function`` once per rank, each in its own thread, and collect the results by rank.

    Raises:
        Exception: whatever the first rank to fail raised, once all threads have ended.
    """
    group = SimulatedGroup(size, timeout_s)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(group.comm(rank))
        except BaseException as error:  # handed to the caller below, whatever it is
            errors.append(error)
            group.fail(rank, f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A rank that was merely released says nothing new: prefer the cause.
        raise next((error for error in errors if not isinstance(error, RankError)), errors[0])
    return [results[rank] for rank in range(size)]
