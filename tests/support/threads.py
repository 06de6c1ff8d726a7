"""Ranks as threads of this process: the production workers over simulated collectives, in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from shoal.checkpoint.progress import Report
from shoal.comm.simulated import SimulatedGroup
from shoal.messages import AllocateKV, RankReady, RankReport, Step, StepResult
from shoal.worker.executor import Load, make_starts
from shoal.worker.rank import RankWorker

Result = TypeVar("Result")


class ThreadExecutor:
    """An executor (see :class:`shoal.worker.executor.Executor`) whose ranks are threads."""

    computes_apart = True  # so that tests may run steps ahead
    is_interruptible = False
    is_replaceable = False

    def __init__(self, load: Load) -> None:
        self._load = load
        self._group = SimulatedGroup(load.world_size, timeout_s=120)
        self._workers = [RankWorker(self._group.comm(rank)) for rank in range(load.world_size)]
        self._pool = ThreadPoolExecutor(load.world_size)
        self._submitted: deque[Step] = deque()

    def load(self, report: Report) -> list[RankReport]:
        starts = make_starts(self._load, "")
        return self._on_all(lambda worker, rank: worker.start(starts[rank]))

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        return self._on_all(lambda worker, _: worker.allocate(message))

    def reload(self) -> None:
        raise NotImplementedError

    def submit(self, step: Step) -> None:
        self._submitted.append(step)

    def collect(self) -> StepResult:
        step = self._submitted.popleft()
        return self._on_all(lambda worker, _: worker.execute(step))[0]

    def check(self) -> None:
        """Threads do not die."""

    def interrupt(self) -> None:
        """They load to the end."""

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.close()
        self._pool.shutdown()

    def _on_all(self, call: Callable[[RankWorker, int], Result]) -> list[Result]:
        def guarded(rank: int) -> Result:
            try:
                return call(self._workers[rank], rank)
            except BaseException as error:
                self._group.fail(rank, str(error))  # the others wait for it in a collective
                raise

        futures: list[Future[Any]] = [self._pool.submit(guarded, rank) for rank in range(len(self._workers))]
        return [future.result() for future in futures]
