"""What ranks say to each other about a model in one process's memory. Plain data; knows no socket.

The leader (rank 0, the program's own process) says ``Begin`` and how to come by the model; then, for each
call, a ``Before`` and a ``Call``, and when every rank has answered ``Go`` or ``SKIP``. A member answers
``Ready``, ``Done`` or ``Failed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.comm.choose import Transport
from shoal.parallel.parts import Drop, Operation
from shoal.parallel.surroundings import HookChange, RandomState

__all__ = ["OVER", "SKIP", "Before", "Begin", "Call", "Done", "Failed", "Go", "Ready"]

SKIP = b"skip"  # another rank is not ready: nobody runs the call
OVER = b"over"  # every rank is out of a call that failed


@dataclass(frozen=True, slots=True)
class Begin:
    """The first word to a member."""

    rank: int
    size: int
    rendezvous: str
    device: str
    num_threads: int
    timeout_s: float
    sys_path: Sequence[str]  # where the program finds its modules
    plan: dict[str, Any]
    comm: Transport


@dataclass(frozen=True, slots=True)
class Before:
    """What to do ahead of a call."""

    keep: Sequence[tuple[int, int]]  # of the tensors the last call met: position, number from now on
    journal: Sequence[Operation | Drop]


@dataclass(frozen=True, slots=True)
class Call:
    """A module's forward, and what it depends on."""

    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    hooks: Sequence[HookChange]
    random: RandomState | None  # None: as the last call left it
    autocast: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Go:
    """Every rank is ready: run it."""

    exclusive: Sequence[int]  # numbers of tensors that nobody but the call holds


@dataclass(frozen=True, slots=True)
class Ready:
    """A member can run the call, or has its part of the model."""


@dataclass(frozen=True, slots=True)
class Done:
    """A member has run the call, and met so many tensors."""

    num_tensors: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A member could not."""

    kind: str  # the exception's class
    message: str
    traceback: str
