"""How a scheduler stands, in numbers. Knows no scheduler."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges now, and counters since the start. Running and waiting count branches."""

    num_running: int
    num_waiting: int
    num_queued_requests: int  # those that wait beyond what the next step has room for
    num_queued_tokens: int  # prompt tokens of all that wait
    cache_usage: float  # share of blocks held, 0 to 1: of the kind of which there are fewer left
    window_cache_usage: float = 0.0  # the same of the blocks of layers that see a window
    num_prefix_queries: int  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int  # of these, found
    num_preemptions: int
