"""Which cores each rank keeps to. Knows no model and starts no thread.

Ranks wait for each other many times a step, so one that has to share its core holds up all of them. On a CPU
each gets cores of its own; what is left, the lowest ones, is for the engine and the server.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from shoal.device.cpu import usable_cores

__all__ = ["pin_thread", "rank_cores"]


def rank_cores(
    rank: int, ranks: int, threads: int, replica: int = 0, cores: Collection[int] | None = None
) -> list[int] | None:
    """The cores of one rank, one for each of its threads; the same sets on whichever rank this is asked.

    Args:
        ranks: of one engine.
        threads: of each rank.
        replica: this engine's number among those that share the machine.
        cores: that all of them may use; None: this process's.

    Returns:
        the cores in order, or None where nothing is to be pinned: there are fewer cores than threads, a quota
        leaves only some of the cores' time, or the system has no call for it.
    """
    if cores is None:
        if not hasattr(os, "sched_getaffinity"):  # macOS
            return None
        cores = os.sched_getaffinity(0)
        if usable_cores() < len(cores):
            return None
    end = len(cores) - (replica * ranks + ranks - 1 - rank) * threads
    return sorted(cores)[end - threads : end] if len(cores) >= (replica + 1) * ranks * threads else None


def pin_thread(cores: Collection[int]) -> None:
    """Keep the calling thread, and those it starts from now on, to ``cores``."""
    os.sched_setaffinity(0, cores)
