"""How long collectives take over each transport, between real processes of this host. Knows no model.

The ranks join one group per transport and go through them in turn, a few calls each, so that whatever else
the machine does meets all alike. The parent only starts them and collects what rank 0 measured.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.errors import RankError, UsageError
from shoal.process.child import Child, spawn
from shoal.process.frames import Frames

__all__ = ["BACKENDS", "OPERATIONS", "Order", "Row", "measure"]

BACKENDS = ("shm", "gloo")
OPERATIONS = ("all_reduce", "all_gather", "broadcast")
_STOP_S = 5.0
_START_S = 120.0  # for processes to start, and to compile what they need


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure."""

    backends: Sequence[str] = BACKENDS
    operations: Sequence[str] = ("all_reduce",)
    sizes: Sequence[int] = (4096, 65536, 1048576)  # bytes, of the tensor that comes out
    ranks: int = 2
    repeats: int = 200
    timeout_s: float = 60.0  # for ranks to join, and for a collective

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            UsageError: an unknown name, or a number out of range.
        """
        for field, known in (("backends", BACKENDS), ("operations", OPERATIONS)):
            unknown = [name for name in getattr(self, field) if name not in known]
            if unknown or not getattr(self, field):
                said = ", ".join(unknown) or "nothing"
                raise UsageError(f"{field}: {said} is none of {', '.join(known)}", field=field)
        if not 2 <= self.ranks <= 8:
            raise UsageError(f"ranks: 2 to 8, got {self.ranks}", field="ranks")
        if self.repeats < 1:
            raise UsageError(f"repeats: at least 1, got {self.repeats}", field="repeats")
        least = 4 * self.ranks
        if not self.sizes or any(size < least or size % least for size in self.sizes):
            wrong = ", ".join(map(str, self.sizes)) or "none"
            raise UsageError(f"sizes: multiples of {least} bytes, got {wrong}", field="sizes")


@dataclass(frozen=True, slots=True)
class Row:
    """One operation at one size over one transport."""

    backend: str
    op: str
    bytes: int  # of the tensor that comes out
    ranks: int
    median_us: float
    p90_us: float
    gbytes_per_s: float  # bytes over the median; a GB is 10^9 bytes


def measure(order: Order) -> list[Row]:
    """Start the ranks, and return rank 0's times.

    Raises:
        UsageError: the order cannot be carried out.
        RankError: a rank failed, or did not answer.
    """
    order.check()
    from shoal.comm.torch_dist import open_store, use_loopback

    environment = dict(os.environ)
    use_loopback(environment)
    stores = {backend: open_store() for backend in order.backends}
    meetings = {backend: address for backend, (_, address) in stores.items()}
    children: list[Child] = []
    try:
        for _ in range(order.ranks):
            children.append(Child(lambda fd, life: spawn("shoal.bench.comm_rank", fd, life, environment)))
        frames = [Frames(child.socket) for child in children]
        for rank, channel in enumerate(frames):
            told = {"rank": rank, "meetings": meetings, **asdict(order)}
            channel.send_bytes(json.dumps(told).encode(), order.timeout_s)
        limit_s = _START_S + order.timeout_s * (1 + len(order.sizes) * len(order.operations))
        answers = [_answer(rank, children[rank], frames[rank], limit_s) for rank in range(order.ranks)]
    finally:
        for child in children:
            child.socket.close()
        deadline = time.monotonic() + _STOP_S
        for child in children:
            child.stop(deadline)
    return [Row(**row) for row in answers[0]]


def _answer(rank: int, child: Child, frames: Frames, timeout_s: float) -> list[dict[str, Any]]:
    try:
        answer: dict[str, Any] = json.loads(frames.receive_bytes(timeout_s))
    except EOFError as error:
        raise RankError(f"rank {rank} {child.obituary()}", rank) from error
    except TimeoutError as error:
        raise RankError(f"rank {rank} did not answer within {timeout_s:g} s", rank) from error
    if "error" in answer:
        raise RankError(f"rank {rank}: {answer['error']}", rank)
    rows: list[dict[str, Any]] = answer["rows"]
    return rows
