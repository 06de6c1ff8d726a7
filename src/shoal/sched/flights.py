"""The steps that were handed out and not answered yet. Knows no blocks, no queue and no budget."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.sched.request import Request, Status

__all__ = ["MOST_IN_FLIGHT", "Flights", "Share"]

MOST_IN_FLIGHT = 2

Share = tuple[Request, int]
"""A branch, and how many tokens it computes in a step."""


@dataclass(frozen=True, slots=True)
class _Flight:
    step_id: int
    shares: list[Share]


class Flights:
    """Steps in the order in which they are answered. Counts each branch's tokens and steps in flight."""

    def __init__(self) -> None:
        self._flights: deque[_Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def launch(self, step_id: int, shares: list[Share]) -> None:
        """A step is handed out."""
        assert len(self._flights) < MOST_IN_FLIGHT, "the last steps were not answered yet"
        for request, count in shares:
            request.num_scheduled += count
            request.num_flights += 1
        self._flights.append(_Flight(step_id, shares))

    def land(self, step_id: int) -> list[Share]:
        """The oldest step is answered; its shares."""
        assert self._flights and self._flights[0].step_id == step_id, f"it is not step {step_id}'s turn"
        shares = self._flights.popleft().shares
        for request, _count in shares:
            request.num_flights -= 1
        return shares

    def requests(self) -> set[Request]:
        """The branches in any of them."""
        return {request for flight in self._flights for request, _count in flight.shares}

    def clear(self) -> None:
        """Nobody will answer them."""
        self._flights.clear()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that the counts of ``requests`` and of whoever is in a step agree with the steps."""
        num_flights: Counter[Request] = Counter()
        num_tokens: Counter[Request] = Counter()
        for flight in self._flights:
            for request, count in flight.shares:
                num_flights[request] += 1
                num_tokens[request] += count
        for request in {*requests, *num_flights}:
            assert request.num_flights == num_flights[request]
            if request.status is not Status.FINISHED:
                assert request.num_scheduled - request.num_computed == num_tokens[request]
