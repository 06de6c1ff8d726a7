"""How long requests run, and so when a full queue is worth trying again. Knows no queue and no clock."""

from __future__ import annotations

from collections import deque

__all__ = ["Pace"]

_MOST_SEEN = 128  # requests that the mean is taken of
_LEAST_S, _MOST_S = 1.0, 600.0


class Pace:
    """What the last requests took, from their first token to their end."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=_MOST_SEEN)

    def ended(self, duration_s: float) -> None:
        """A request has left, ``duration_s`` seconds after its first token."""
        self._durations_s.append(duration_s)

    def seconds_for(self, num_waiting: int, num_running: int) -> float:
        """Until those who wait have found a place, if as many as now run at once; 1 s to 10 minutes."""
        if not self._durations_s:
            return _LEAST_S
        mean_s = sum(self._durations_s) / len(self._durations_s)
        return min(max(mean_s * num_waiting / max(num_running, 1), _LEAST_S), _MOST_S)
