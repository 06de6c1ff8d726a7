"""A decoder over ranks of which one fails what it tries: for tests of what they agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shoal.attention.base import AttentionBatch, LayerPages, PagedKernel, Variant
from shoal.attention.sdpa import paged_sdpa
from shoal.comm.base import Comm
from shoal.model.choose import Chosen, serve_causal
from shoal.model.trial import Trials
from shoal.plan.types import Plan
from shoal.shard import shard
from support.zoo.build import build
from support.zoo.catalogue import family_of

__all__ = ["FAULTS", "chosen_with_a_fault", "failing", "forgetful", "way_with_a_fault"]

_CALLS_BEFORE = 2  # of a kernel that fails, so that it does in the middle of a pass


def failing() -> PagedKernel:
    """Runs out of memory in the middle of a pass, before sums that other ranks wait in."""
    calls = 0

    def kernel(*call: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > _CALLS_BEFORE:
            raise RuntimeError("not enough memory: you tried to allocate 12 bytes")
        return paged_sdpa(*call)

    return kernel


def forgetful() -> PagedKernel:
    """Sees the newest position only."""

    def kernel(
        query: torch.Tensor,
        pages: LayerPages,
        batch: AttentionBatch,
        variant: Variant,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        return paged_sdpa(query, pages, batch, variant._replace(window=1), sinks)

    return kernel


class Fault(NamedTuple):
    """What a rank's kernel has."""

    kernel: Callable[[], PagedKernel]
    said: str  # of it by all ranks; the rank's number goes in


FAULTS = {
    "failing": Fault(failing, "on rank {}: RuntimeError: not enough memory"),
    # What one rank's heads get wrong is in the sum that all have.
    "forgetful": Fault(forgetful, "logits step by step differ by "),
}


@torch.inference_mode()
def chosen_with_a_fault(comm: Comm, family: str, plan: Plan, fault: str, rank: int) -> Chosen:
    """What this rank takes for a family's model, if the kernel of ``rank`` has a fault."""
    model = build(family_of(family), "eager", torch.float32)
    trials = Trials(shard(model, plan, comm.rank, comm))
    kernel = FAULTS[fault].kernel() if comm.rank == rank else paged_sdpa
    return serve_causal(model, kernel, torch.device("cpu"), trials=trials)


def way_with_a_fault(
    comm: Comm, family: str, plan: dict[str, object], fault: str, rank: int
) -> tuple[str, tuple[str, ...], list[float]]:
    """For a pool of processes: the way, what was said, and logits of a prompt without pages."""
    chosen = chosen_with_a_fault(comm, family, Plan.from_dict(plan), fault, rank)
    with torch.inference_mode():
        logits = chosen.model.plain(torch.tensor([5, 9, 40, 7]), torch.tensor([3]))
    return chosen.model.way, chosen.notes, logits[0].tolist()
