"""Ranks as threads of this process: the production workers over simulated collectives, in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from shoal.checkpoint.progress import Report
from shoal.comm.simulated import SimulatedGroup
from shoal.config import EngineConfig
from shoal.errors import RankError
from shoal.messages import AllocateKV, RankReady, RankReport, Step, StepResult
from shoal.plan.types import Plan
from shoal.worker.load import Load, make_starts
from shoal.worker.rank import RankWorker

Result = TypeVar("Result")

_TIMEOUT_S = 120  # of collectives, loads and steps: other processes may want the cores


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Engines that are started meanwhile run every rank as a thread."""

    def executor(config: EngineConfig, path: Path, plan: Plan) -> ThreadExecutor:
        return ThreadExecutor(
            Load(
                config=config.model_dump(),
                model_path=str(path),
                plan=plan.to_dict(),
                world_size=config.tensor_parallel_size,
                load_timeout_s=_TIMEOUT_S,
                step_timeout_s=_TIMEOUT_S,
            )
        )

    with patch("shoal.engine.launch._executor", executor):
        yield


class ThreadExecutor:
    """An executor (see :class:`shoal.worker.executor.Executor`) whose ranks are threads."""

    computes_apart = True  # so that tests may run steps ahead
    is_interruptible = False
    is_replaceable = False

    def __init__(self, load: Load) -> None:
        self._load = load
        self._group = SimulatedGroup(load.world_size, timeout_s=_TIMEOUT_S)
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
        failures = [error for future in futures if (error := future.exception()) is not None]
        if failures:  # not that of a rank that another one's failure ended
            raise next((error for error in failures if not isinstance(error, RankError)), failures[0])
        return [future.result() for future in futures]
