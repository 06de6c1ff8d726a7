"""What those who drive an engine ask of it, whether it generates text or makes vectors: take requests in,
step, hand out. Knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from shoal.engine.protocol import EngineInfo, EngineStats
from shoal.engine.supervisor import Supervisor

__all__ = ["Core", "Delta"]

Params = TypeVar("Params", contravariant=True)


class Delta(Protocol):
    """What one request gained."""

    request_id: str
    finished: bool


D = TypeVar("D", bound=Delta)


class Core(Protocol[Params, D]):
    """An engine on the thread of whoever calls it."""

    info: EngineInfo
    supervisor: Supervisor

    @property
    def has_work(self) -> bool:
        """Some request is not answered."""
        ...

    @property
    def can_step(self) -> bool:
        """There is work, and there are ranks for it."""
        ...

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: Params, /) -> int:
        """Take a request in, and say of how many sequences; a refusal is raised, and nothing has changed."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request, known or not."""
        ...

    def step(self) -> list[D]:
        """Have one step answered; what it brought."""
        ...

    def check(self) -> list[D]:
        """For moments without a step: see whether the ranks are there; what their loss brought."""
        ...

    def interrupted(self) -> None:
        """After an exception from outside in the middle of a step."""
        ...

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        ...

    def shutdown(self) -> None:
        """Stop the ranks."""
        ...
