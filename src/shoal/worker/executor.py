"""Drives ranks: one in this process (:class:`InlineExecutor`), or each in a process of its own
(:class:`ProcessExecutor`). Knows no request; it moves messages and notices who died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from shoal.checkpoint.progress import Report
from shoal.comm.torch_dist import open_store, use_loopback
from shoal.errors import EngineError, RankError, UsageError
from shoal.messages import (
    AllocateKV,
    Failure,
    LoadProgress,
    Message,
    RankReady,
    RankReport,
    Shutdown,
    Start,
    Step,
    StepResult,
    encode,
)
from shoal.worker.channel import Channel
from shoal.worker.rank import RankWorker

__all__ = [
    "Answer",
    "Executor",
    "InlineExecutor",
    "Load",
    "ProcessExecutor",
    "RankProcess",
    "gather_replies",
    "make_starts",
]

_log = logging.getLogger("shoal.worker")
_SHUTDOWN_S = 10.0

Answer = TypeVar("Answer", RankReport, RankReady, StepResult)


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


class InlineExecutor:
    """The only rank, in this process."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._worker: RankWorker | None = None

    def load(self, report: Report) -> list[RankReport]:
        self._worker = RankWorker()
        return [self._worker.start(make_starts(self._load, "")[0], report)]

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        return [self._running().allocate(message)]

    def execute(self, step: Step) -> StepResult:
        try:
            return self._running().execute(step)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            raise RankError(f"step {step.step_id} failed: {error}", rank=0) from error

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _running(self) -> RankWorker:
        if self._worker is None:
            raise EngineError("the executor is not running")
        return self._worker


class RankProcess:
    """One rank's process and the channel to it.

    The child also inherits the read end of a pipe whose write end only this process holds: when this
    process is gone, however it went, the child reads the end of file and exits.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        life_read, self._life_write = os.pipe()
        environment = dict(os.environ)
        use_loopback(environment)
        # Found from wherever the caller's program runs, installed or not.
        package_root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(
            p for p in (package_root, environment.get("PYTHONPATH")) if p
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal.worker", str(theirs.fileno()), str(life_read)],
            env=environment,
            pass_fds=(theirs.fileno(), life_read),
            stdin=subprocess.DEVNULL,
            stdout=_stderr_or_null(),
            start_new_session=True,  # Ctrl-C in a terminal is the engine's to handle
        )
        theirs.close()
        os.close(life_read)
        self.channel = Channel(ours)

    def stop(self, deadline: float) -> None:
        """Wait for the process until ``deadline`` (monotonic), then kill it."""
        try:
            self.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.channel.close()
        if self._life_write >= 0:
            os.close(self._life_write)
            self._life_write = -1


def _stderr_or_null() -> int:
    """A rank's stdout goes to stderr, so that ours carries only what the user asked for."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


class ProcessExecutor:
    """Every rank in a process of its own on this host."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._ranks: list[RankProcess] = []
        self._store: Any = None

    def load(self, report: Report) -> list[RankReport]:
        self._store, rendezvous = open_store()
        self._ranks = [RankProcess(rank) for rank in range(self._load.world_size)]
        try:
            for start, rank in zip(make_starts(self._load, rendezvous), self._ranks, strict=True):
                self._send(rank, encode(start))
            return self._collect(RankReport, self._load.load_timeout_s, report)
        except BaseException:
            self._kill()
            raise

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        return self._ask(message, RankReady, self._load.load_timeout_s)

    def execute(self, step: Step) -> StepResult:
        return self._ask(step, StepResult, self._load.step_timeout_s)[0]

    def shutdown(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it may be dead already, which is what we want
                rank.channel.send(Shutdown())
        deadline = time.monotonic() + _SHUTDOWN_S
        for rank in self._ranks:
            rank.stop(deadline)
        self._ranks = []
        self._store = None

    def _ask(self, message: Message, answer: type[Answer], timeout_s: float) -> list[Answer]:
        if not self._ranks:
            raise EngineError("the executor is not running")
        data = encode(message)
        try:
            for rank in self._ranks:
                self._send(rank, data)
            return self._collect(answer, timeout_s, None)
        except BaseException:
            # The others may wait in a collective for one that will not come; the group is lost.
            self._kill()
            raise

    def _send(self, rank: RankProcess, data: bytes) -> None:
        try:
            rank.channel.send_bytes(data)
        except OSError as error:
            raise RankError(self._obituary(rank), rank.rank) from error

    def _collect(self, answer: type[Answer], timeout_s: float, report: Report | None) -> list[Answer]:
        def gone(index: int) -> str:
            return self._obituary(self._ranks[index])

        return gather_replies([r.channel for r in self._ranks], answer, timeout_s, gone, report)

    def _obituary(self, rank: RankProcess) -> str:
        try:
            status = rank.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return f"rank {rank.rank} closed its channel"
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return f"rank {rank.rank} {how}"

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.stop(time.monotonic())
        self._ranks = []
        self._store = None


def gather_replies(
    channels: Sequence[Channel],
    answer: type[Answer],
    timeout_s: float,
    gone: Callable[[int], str],
    report: Report | None = None,
) -> list[Answer]:
    """One answer from every channel, in their order.

    Args:
        gone: what to say of the channel whose other end closed.

    Raises:
        UsageError: a rank says that the user's input is wrong.
        RankError: a rank failed, closed its channel, or did not answer in time.
    """
    replies: list[Answer | None] = [None] * len(channels)
    shares = [LoadProgress(done=0, total=0)] * len(channels)
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for index, channel in enumerate(channels):
            selector.register(channel, selectors.EVENT_READ, index)
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                late = sorted(cast(int, key.data) for key in selector.get_map().values())
                raise RankError(f"rank {late[0]} did not answer within {timeout_s:g} s", late[0])
            for key, _ in ready:
                index = cast(int, key.data)
                message = _receive(channels[index], index, deadline, gone)
                if isinstance(message, LoadProgress):
                    shares[index] = message
                    if report is not None:
                        report(sum(s.done for s in shares), sum(s.total for s in shares))
                    continue
                replies[index] = _expect(message, index, answer)
                selector.unregister(channels[index])
    return [reply for reply in replies if reply is not None]


def _receive(channel: Channel, index: int, deadline: float, gone: Callable[[int], str]) -> Message:
    try:
        return channel.receive(max(deadline - time.monotonic(), 1e-3))
    except EOFError as error:
        raise RankError(gone(index), index) from error
    except TimeoutError as error:
        raise RankError(f"rank {index} stopped in the middle of an answer", index) from error


def _expect(message: Message, index: int, answer: type[Answer]) -> Answer:
    if isinstance(message, Failure):
        if message.usage:
            raise UsageError(message.message, field=message.field)
        _log.error("rank %d failed:\n%s", message.rank, message.traceback)
        raise RankError(f"rank {message.rank}: {message.kind}: {message.message}", message.rank)
    if not isinstance(message, answer):
        raise RankError(f"rank {index} answered with {type(message).__name__}", index)
    return message
