"""How ranks that know each other already tell one another small things. Knows not what for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.comm.base import Comm
from shoal.errors import RankError

__all__ = ["Exchange", "exchange_over", "exchange_through"]

Exchange = Callable[[str], list[str]]
"""Called by every rank alike with its own words, never none; returns everybody's, in rank order."""


def exchange_through(
    meeting: TCPStore | str, rank: int, size: int, timeout_s: float, generation: int = 0
) -> Exchange:
    """By way of a store.

    Args:
        meeting: the store, or its ``host:port``.
        timeout_s: how long the others may take.
        generation: of the group. Ranks of another one are neither heard nor disturbed.

    Returns:
        what raises RankError if a rank did not come.
    """
    timeout = timedelta(seconds=timeout_s)
    stores: list[TCPStore] = [] if isinstance(meeting, str) else [meeting]
    rounds = 0

    def exchange(mine: str) -> list[str]:
        nonlocal rounds
        rounds += 1
        prefix = f"shoal/{generation}/{rounds}"
        try:
            if not stores:
                host, _, port = str(meeting).rpartition(":")
                stores.append(TCPStore(host, int(port), is_master=False, timeout=timeout))
            store = stores[0]
            store.set(f"{prefix}/{rank}", mine)
            keys = [f"{prefix}/{other}" for other in range(size)]
            store.wait(keys, timeout)
            return [store.get(key).decode() for key in keys]
        except (RuntimeError, ValueError) as error:
            raise RankError(f"rank {rank} could not join its group: {error}", rank) from error

    return exchange


def exchange_over(comm: Comm) -> Exchange:
    """By way of a group that exists."""

    def exchange(mine: str) -> list[str]:
        words = mine.encode()
        lengths = comm.all_gather(torch.tensor([len(words)]), [1] * comm.size, 0).tolist()
        everyone = comm.all_gather(torch.frombuffer(bytearray(words), dtype=torch.uint8), lengths, 0)
        data, ends = bytes(everyone.tolist()), list(itertools.accumulate(lengths))
        return [data[end - length : end].decode() for end, length in zip(ends, lengths, strict=True)]

    return exchange
