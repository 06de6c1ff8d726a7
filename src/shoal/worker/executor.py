"""Drives ranks: one in this process (:class:`InlineExecutor`), or each in a process of its own
(:class:`ProcessExecutor`). Knows no request; it moves messages and notices who died.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.checkpoint.progress import Report
from shoal.comm.torch_dist import open_store, use_loopback
from shoal.errors import EngineError, RankError, ShoalError
from shoal.messages import (
    AllocateKV,
    Message,
    RankReady,
    RankReport,
    Shutdown,
    Start,
    Step,
    StepResult,
    encode,
)
from shoal.process.child import Child, spawn
from shoal.worker.channel import Channel
from shoal.worker.rank import RankWorker
from shoal.worker.replies import Answer, gather_replies

__all__ = [
    "Executor",
    "InlineExecutor",
    "Load",
    "ProcessExecutor",
    "RankProcess",
    "inline_errors",
    "make_starts",
]

_SHUTDOWN_S = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """What every rank builds."""

    config: dict[str, Any]  # EngineConfig as plain data
    model_path: str
    plan: dict[str, Any]  # Plan as plain data
    world_size: int
    load_timeout_s: float
    step_timeout_s: float


class Executor(Protocol):
    """The ranks of one engine, as the engine core sees them. Calls come from one thread at a time."""

    def load(self, report: Report) -> list[RankReport]:
        """Start the ranks and have each build its part; reports in rank order.

        Raises:
            UsageError: the model cannot be served as asked.
            RankError: a rank failed or died.
        """
        ...

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        """Have every rank make its KV pages and warm up; answers in rank order."""
        ...

    def execute(self, step: Step) -> StepResult:
        """Run one step on every rank; the sampling rank's result.

        Raises:
            RankError: a rank raised, died, or did not answer within the step timeout.
        """
        ...

    @property
    def is_interruptible(self) -> bool:
        """Whether a Ctrl-C in the middle of :meth:`execute` leaves the ranks as good as before."""
        ...

    def check(self) -> None:
        """Between steps: whether the ranks are still there, as far as that can be seen without asking.

        Raises:
            RankError: one is not.
        """
        ...

    def shutdown(self) -> None:
        """Stop the ranks and release everything. Safe to call twice."""
        ...


def make_starts(load: Load, rendezvous: str) -> list[Start]:
    """The first message of each rank."""
    return [
        Start(
            rank=rank,
            world_size=load.world_size,
            config=load.config,
            model_path=load.model_path,
            plan=load.plan,
            rendezvous=rendezvous,
        )
        for rank in range(load.world_size)
    ]


@contextlib.contextmanager
def inline_errors(rank: int, what: str) -> Iterator[None]:
    """For a rank in this process: what its model's code raises is a rank's failure, as from a process.

    Raises:
        RankError: anything but an error of ours was raised inside.
    """
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # the edge of a rank: model code, torch and numpy raise whatever they like
        raise RankError(f"rank {rank}: {what}: {type(error).__name__}: {error}", rank) from error


class InlineExecutor:
    """The only rank, in this process."""

    is_interruptible = True  # a rank keeps nothing between steps

    def __init__(self, load: Load) -> None:
        self._load = load
        self._worker: RankWorker | None = None

    def load(self, report: Report) -> list[RankReport]:
        self._worker = RankWorker()
        with inline_errors(0, "loading"):
            return [self._worker.start(make_starts(self._load, "")[0], report)]

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        with inline_errors(0, f"making {message.num_blocks} KV blocks"):
            return [self._running().allocate(message)]

    def execute(self, step: Step) -> StepResult:
        with inline_errors(0, f"step {step.step_id}"):
            return self._running().execute(step)

    def check(self) -> None:
        """This process is the rank."""

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _running(self) -> RankWorker:
        if self._worker is None:
            raise EngineError("the executor is not running")
        return self._worker


class RankProcess(Child):
    """One rank's process and the channel to it."""

    def __init__(self, rank: int) -> None:
        super().__init__(_spawn)
        self.rank = rank
        self.channel = Channel(self.socket)


def _spawn(channel_fd: int, life_fd: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    use_loopback(environment)
    return spawn("shoal.worker", channel_fd, life_fd, environment)


class ProcessExecutor:
    """Every rank in a process of its own on this host."""

    is_interruptible = False  # answers that nobody took would be taken for the next step's

    def __init__(self, load: Load) -> None:
        self._load = load
        self._ranks: list[RankProcess] = []
        self._store: Any = None
        self._owner = os.getpid()

    def load(self, report: Report) -> list[RankReport]:
        try:
            rendezvous = ""
            if self._load.world_size > 1:
                self._store, rendezvous = open_store()
            for rank in range(self._load.world_size):
                self._ranks.append(RankProcess(rank))
            for start, process in zip(make_starts(self._load, rendezvous), self._ranks, strict=True):
                self._send(process, encode(start), self._load.load_timeout_s)
            return self._collect(RankReport, self._load.load_timeout_s, report)
        except BaseException:
            self._kill()
            raise

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        return self._ask(message, RankReady, self._load.load_timeout_s)

    def execute(self, step: Step) -> StepResult:
        return self._ask(step, StepResult, self._load.step_timeout_s)[0]

    def check(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is not None:
                obituary = self._obituary(rank.rank)
                self._kill()
                raise RankError(obituary, rank.rank)

    def shutdown(self) -> None:
        if os.getpid() != self._owner:
            return  # in a forked child of the process that drives the ranks: they go on serving that one
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it may be dead already, which is what we want
                rank.channel.send(Shutdown(), _SHUTDOWN_S)
        deadline = time.monotonic() + _SHUTDOWN_S
        for rank in self._ranks:
            rank.stop(deadline)
        self._ranks = []
        self._store = None

    def _ask(self, message: Message, answer: type[Answer], timeout_s: float) -> list[Answer]:
        if not self._ranks:
            raise EngineError("the executor is not running")
        if os.getpid() != self._owner:
            raise EngineError("an engine serves the process that made it, not a fork of it")
        data = encode(message)
        try:
            for rank in self._ranks:
                self._send(rank, data, timeout_s)
            return self._collect(answer, timeout_s, None)
        except BaseException:
            # The others may wait in a collective for one that will not come; the group is lost.
            self._kill()
            raise

    def _send(self, rank: RankProcess, data: bytes, timeout_s: float) -> None:
        try:
            rank.channel.send_bytes(data, timeout_s)
        except TimeoutError as error:
            raise RankError(f"rank {rank.rank} took nothing in for {timeout_s:g} s", rank.rank) from error
        except OSError as error:
            raise RankError(self._obituary(rank.rank), rank.rank) from error

    def _collect(self, answer: type[Answer], timeout_s: float, report: Report | None) -> list[Answer]:
        channels = {rank.rank: rank.channel for rank in self._ranks}
        return gather_replies(channels, answer, timeout_s, self._obituary, report)

    def _obituary(self, rank: int) -> str:
        return f"rank {rank} {self._ranks[rank].obituary()}"

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.stop(time.monotonic())
        self._ranks = []
        self._store = None
