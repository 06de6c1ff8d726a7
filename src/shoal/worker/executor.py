"""Drives ranks: one in this process (:class:`InlineExecutor`), or each in a process of its own
(:class:`ProcessExecutor`). Knows no request; it moves messages and notices who died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from shoal.checkpoint.progress import Report
from shoal.comm.torch_dist import open_store
from shoal.errors import EngineError, RankError
from shoal.messages import (
    AllocateKV,
    Encode,
    Ping,
    RankReady,
    RankReport,
    Shutdown,
    Step,
    StepResult,
    encode,
)
from shoal.worker.channel import Channel
from shoal.worker.failures import inline_errors
from shoal.worker.load import Load, make_starts
from shoal.worker.pulse import Pulse
from shoal.worker.rank import RankWorker
from shoal.worker.rank_process import RankProcess, StopWatch
from shoal.worker.replies import Answer, gather_replies
from shoal.worker.standby import Standby

__all__ = [
    "Executor",
    "InlineExecutor",
    "ProcessExecutor",
]

_events = logging.getLogger("shoal.events")

_SHUTDOWN_S = 10.0
_ANSWER_SHARE = 0.9  # of the step timeout; the rest is for ending the group: it is noticed within all of it
_STOPPED_SHARE = 0.6  # of it, for which a rank that loads may be stopped

# A step that a socket cannot hold is not sent before the last one is answered: its ranks may be about to send
# as much, and then neither end would read.
_MOST_AHEAD_BYTES = 1 << 16
_PING_S = 1.0  # to hand one over: there is room for it, unless a rank has taken nothing in for long


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

    def reload(self) -> None:
        """After a failure: start all ranks anew, with the same pages.

        Raises:
            ShoalError: they do not start.
        """
        ...

    def submit(self, step: Step | Encode) -> None:
        """Hand a step to every rank. Several may be on their way; ranks take them in order.

        Raises:
            RankError: a rank takes nothing in. One that is gone is :meth:`collect`'s to tell.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that was not collected yet; the sampling rank's result.

        Raises:
            RankError: a rank raised, died, or did not answer within the step timeout.
        """
        ...

    @property
    def computes_apart(self) -> bool:
        """Whether ranks compute while the caller does something else: who submits early gains time."""
        ...

    @property
    def is_interruptible(self) -> bool:
        """Whether a Ctrl-C in the middle of :meth:`collect` leaves the ranks as good as before."""
        ...

    @property
    def is_replaceable(self) -> bool:
        """Whether the ranks are ours to :meth:`reload`."""
        ...

    def interrupt(self) -> None:
        """From another thread: have a :meth:`reload` under way fail soon, as far as that can be done."""
        ...

    def check(self) -> None:
        """Between steps, a few times a second: whether the ranks are still there, and answer.

        Raises:
            RankError: one is not, or has not answered for about the step timeout.
        """
        ...

    def shutdown(self) -> None:
        """Stop the ranks and release everything. Safe to call twice."""
        ...


class InlineExecutor:
    """The only rank, in this process."""

    computes_apart = False
    is_interruptible = True  # a rank keeps nothing that the next step does not bring
    is_replaceable = True

    def __init__(self, load: Load) -> None:
        self._load = load
        self._worker: RankWorker | None = None
        self._pages: AllocateKV | None = None
        self._submitted: deque[Step | Encode] = deque()

    def load(self, report: Report) -> list[RankReport]:
        self._worker = RankWorker()
        with inline_errors(0, "loading"):
            return [self._worker.start(make_starts(self._load, "")[0], report)]

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        with inline_errors(0, f"making {message.num_blocks} KV blocks"):
            ready = [self._running().allocate(message)]
        self._load, self._pages = self._load.serving(message), message
        return ready

    def reload(self) -> None:
        assert self._pages is not None, "allocate comes first"
        self.shutdown()
        self.load(lambda done, total: None)
        self.allocate(self._pages)

    def submit(self, step: Step | Encode) -> None:
        self._running()
        self._submitted.append(step)

    def collect(self) -> StepResult:
        """Compute the step, on this thread."""
        step = self._submitted.popleft()
        try:
            with inline_errors(0, f"step {step.step_id}"):
                return self._running().execute(step)
        except BaseException:
            self._submitted.clear()
            raise

    def check(self) -> None:
        """This process is the rank."""

    def interrupt(self) -> None:
        """A thread that loads goes on to its end."""

    def shutdown(self) -> None:
        self._submitted.clear()
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _running(self) -> RankWorker:
        if self._worker is None:
            raise EngineError("the executor is not running")
        return self._worker


class ProcessExecutor:
    """Every rank in a process of its own on this host."""

    computes_apart = True
    is_interruptible = False  # answers that nobody took would be taken for the next step's
    is_replaceable = True

    def __init__(self, load: Load) -> None:
        self._load = load
        self._pages: AllocateKV | None = None
        self._generation = 0
        self._is_ending = False
        self._ranks: list[RankProcess] = []
        self._dying: list[RankProcess] = []  # were killed, and are not waited for yet
        self._standby = Standby(RankProcess)
        self._pulse = Pulse(load.step_timeout_s)
        self._num_submitted = 0  # steps not collected
        self._held: deque[bytes] = deque()  # the last of them, not sent
        self._store: Any = None
        self._owner = os.getpid()

    def load(self, report: Report) -> list[RankReport]:
        self._bury()
        try:
            rendezvous = ""
            if self._load.world_size > 1:
                self._store, rendezvous = open_store()
            for rank in range(self._load.world_size):
                self._ranks.append(self._standby.take(rank))
            pids = ", ".join(str(rank.process.pid) for rank in self._ranks)
            _events.info("starting ranks of generation %d: processes %s", self._generation, pids)
            if self._is_ending:  # looked at once they are in the list, where interrupt() finds them
                raise EngineError("the executor is shutting down")
            starts = make_starts(self._load, rendezvous, self._generation)
            self._generation += 1
            for start, process in zip(starts, self._ranks, strict=True):
                self._send(process, encode(start), self._load.load_timeout_s)
            return self._collect_loaded(RankReport, report)
        except BaseException:
            self._kill()
            self._bury()
            raise

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        self._post(encode(message), self._load.load_timeout_s)
        ready = self._collect_loaded(RankReady)
        self._load, self._pages = self._load.serving(message), message
        self._pulse = Pulse(self._load.step_timeout_s)
        return ready

    def reload(self) -> None:
        assert self._pages is not None, "allocate comes first"
        self.load(lambda done, total: None)
        self.allocate(self._pages)

    def submit(self, step: Step | Encode) -> None:
        data = encode(step)
        if self._held or (self._num_submitted and len(data) > _MOST_AHEAD_BYTES):
            self._held.append(data)
        else:
            self._post(data, self._patience_s)
        self._num_submitted += 1

    def collect(self) -> StepResult:
        result = self._collect(StepResult, self._patience_s)[0]
        self._num_submitted -= 1
        if self._held:
            self._post(self._held.popleft(), self._patience_s)
        return result

    def check(self) -> None:
        if not self._ranks:
            return
        try:
            self._pulse.look(self._channels(), lambda: self._post(encode(Ping()), _PING_S), self._obituary)
        except BaseException:
            self._kill()
            raise
        if self._load.config.get("standby_ranks"):
            self._standby.fill(self._load.world_size)  # now, when there is nothing else to do

    def interrupt(self) -> None:
        self._is_ending = True
        for rank in list(self._ranks):
            rank.process.kill()

    def shutdown(self) -> None:
        if os.getpid() != self._owner:
            return  # in a forked child of the process that drives the ranks: they go on serving that one
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it may be dead already, which is what we want
                rank.channel.send(Shutdown(), _SHUTDOWN_S)
        deadline = time.monotonic() + _SHUTDOWN_S
        for rank in self._ranks:
            rank.stop(deadline)
        self._bury()
        self._standby.close()
        self._ranks = []
        self._store = None

    def _post(self, data: bytes, timeout_s: float) -> None:
        """Send one message to all ranks."""
        self._require_running()
        try:
            for rank in self._ranks:
                self._send(rank, data, timeout_s)
        except BaseException:
            self._kill()
            raise

    def _send(self, rank: RankProcess, data: bytes, timeout_s: float) -> None:
        try:
            # If it is gone, its last words are read with the answers, and say more.
            with contextlib.suppress(ConnectionError):
                rank.channel.send_bytes(data, timeout_s)
        except TimeoutError as error:
            raise RankError(f"rank {rank.rank} took nothing in for {timeout_s:g} s", rank.rank) from error

    def _collect_loaded(self, answer: type[Answer], report: Report | None = None) -> list[Answer]:
        watch = StopWatch(self._ranks, self._load.step_timeout_s * _STOPPED_SHARE).look
        return self._collect(answer, self._load.load_timeout_s, report, watch)

    def _collect(
        self,
        answer: type[Answer],
        timeout_s: float,
        report: Report | None = None,
        watch: Callable[[], None] | None = None,
    ) -> list[Answer]:
        """One answer of each rank; without, the group is lost: the others may wait in a collective for one
        that will not come.
        """
        self._require_running()
        try:
            answers = gather_replies(self._channels(), answer, timeout_s, self._obituary, report, watch)
        except BaseException:
            self._kill()
            raise
        self._pulse.felt()
        return answers

    @property
    def _patience_s(self) -> float:
        """How long a rank may take to take a step in, or to answer it."""
        return self._load.step_timeout_s * _ANSWER_SHARE

    def _channels(self) -> dict[int, Channel]:
        return {rank.rank: rank.channel for rank in self._ranks}

    def _require_running(self) -> None:
        if not self._ranks:
            raise EngineError("the executor is not running")
        if os.getpid() != self._owner:
            raise EngineError("an engine serves the process that made it, not a fork of it")

    def _obituary(self, rank: int) -> str:
        return self._ranks[rank].obituary()

    def _kill(self) -> None:
        """End the group, now. Until its memory is given back may take a second: who needs the place waits for
        that, not who is to hear of the loss.
        """
        for rank in self._ranks:
            rank.process.kill()
        self._dying += self._ranks
        self._num_submitted = 0
        self._held.clear()
        self._ranks = []
        self._store = None

    def _bury(self) -> None:
        """Wait for the end of those that were killed."""
        for rank in self._dying:
            rank.stop(0.0)
        self._dying = []
