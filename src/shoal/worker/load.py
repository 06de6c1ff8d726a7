"""What ranks are told when they start. Knows no process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal.messages import AllocateKV, Start

__all__ = ["Load", "make_starts"]


@dataclass(frozen=True, slots=True)
class Load:
    """What every rank builds."""

    config: dict[str, Any]  # EngineConfig as plain data
    model_path: str
    plan: dict[str, Any]  # Plan as plain data
    world_size: int
    load_timeout_s: float
    step_timeout_s: float

    def serving(self, pages: AllocateKV) -> Load:
        """The same for ranks that need not find out what the first ones have: how many KV blocks they can
        keep, and how long a step may take.
        """
        return replace(
            self,
            config={**self.config, "num_gpu_blocks_override": pages.num_blocks or None},
            step_timeout_s=pages.step_timeout_s or self.step_timeout_s,
        )


def make_starts(load: Load, rendezvous: str, generation: int = 0) -> list[Start]:
    """The first message of each rank; ``generation`` counts the groups that there were before."""
    return [
        Start(
            rank=rank,
            world_size=load.world_size,
            config=load.config,
            model_path=load.model_path,
            plan=load.plan,
            rendezvous=rendezvous,
            generation=generation,
        )
        for rank in range(load.world_size)
    ]
