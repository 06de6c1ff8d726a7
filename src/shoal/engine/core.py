"""The engine: schedule, execute, update. Holds the truth about every request; ranks are replaceable.

Runs on one thread, the one that calls it. Knows no asyncio and no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.engine.admission import Admission
from shoal.engine.assemble import Assembly
from shoal.engine.outputs import CompletionDelta, RequestDelta
from shoal.engine.protocol import EngineInfo, EngineStats
from shoal.engine.text import Tokenizer
from shoal.sampling_params import SamplingParams
from shoal.sched.request import BranchUpdate
from shoal.sched.scheduler import Scheduler
from shoal.worker.executor import Executor

__all__ = ["EngineCore"]

_log = logging.getLogger("shoal.engine")


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class EngineCore:
    """One engine's requests, from admission to their last delta."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        admission: Admission,
        info: EngineInfo,
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.info = info
        self._scheduler = scheduler
        self._admission = admission
        self._assemblies: dict[str, Assembly] = {}
        self._counters = _Counters()

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Take a request in.

        Raises:
            RequestError: it can never be served. Nothing has changed.
            QueueFullError: too many wait. Nothing has changed.
        """
        branches = self._scheduler.add(self._admission.spec(request_id, prompt_ids, params))
        try:
            self._assemblies[request_id] = Assembly(request_id, branches, self.tokenizer, params)
        except BaseException:
            self._scheduler.abort(request_id)
            raise
        self._admission.num_admitted += 1
        self._counters.prompt_tokens += len(prompt_ids)

    def abort(self, request_id: str) -> None:
        """Forget a request, known or not (it may just have ended); no delta of it comes any more."""
        for request in self._scheduler.abort(request_id):
            self._count_end(request.finish_reason or "abort")
        self._assemblies.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_unfinished > 0

    def step(self) -> list[RequestDelta]:
        """Compute one step; what it brought, at most one delta a request.

        Raises:
            RankError: the ranks are gone. The requests are still known, but after this, or any other
                error, there is no further step.
        """
        step = self._scheduler.schedule()
        if step is None:
            return []
        result = self.executor.execute(step)
        updates = self._scheduler.update(step, result)
        self._counters.steps += 1
        return self._deltas(updates)

    def check(self) -> None:
        """For idle moments.

        Raises:
            RankError: a rank has died since the last step.
        """
        self.executor.check()

    def recover(self) -> bool:
        """After a step that was interrupted: forget the step in flight if the ranks are as good as before.

        Returns:
            whether they are; every unfinished request then starts over.
        """
        if not self.executor.is_interruptible:
            return False
        self._scheduler.reset()
        return True

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        scheduler, counters = self._scheduler.stats, self._counters
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.cache_usage,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            prefix_cache_queries_total=scheduler.num_prefix_queries,
            prefix_cache_hits_total=scheduler.num_prefix_hits,
            preemptions_total=scheduler.num_preemptions,
            steps_total=counters.steps,
            requests_total=dict(counters.finished),
        )

    def shutdown(self) -> None:
        """Stop the ranks."""
        self.executor.shutdown()

    def _deltas(self, updates: Sequence[BranchUpdate]) -> list[RequestDelta]:
        by_request: dict[str, list[BranchUpdate]] = {}
        for update in updates:
            request_id = update.request.request_id
            own = by_request.get(request_id)
            if own is None:
                by_request[request_id] = [update]
            else:
                own.append(update)
        return [self._delta(request_id, own) for request_id, own in by_request.items()]

    def _delta(self, request_id: str, updates: Sequence[BranchUpdate]) -> RequestDelta:
        assembly = self._assemblies[request_id]
        outputs = []
        for update in updates:
            output, stop = self._push(assembly, update)
            self._counters.generation_tokens += len(output.token_ids)
            if stop is not None:
                self._scheduler.finish(update.request.sequence_id, "stop", stop)
            if output.finish_reason is not None:
                self._count_end(output.finish_reason)
            outputs.append(output)
        if assembly.is_finished:
            del self._assemblies[request_id]
        return assembly.delta(outputs)

    def _push(self, assembly: Assembly, update: BranchUpdate) -> tuple[CompletionDelta, str | None]:
        try:
            return assembly.push(update)
        except Exception as error:  # a tokenizer's own code failed on one text: that is no one else's matter
            _log.exception("the text of request %s cannot be made", update.request.request_id)
            self._scheduler.finish(update.request.sequence_id, "error")
            return assembly.fail(update.request.branch, f"{type(error).__name__}: {error}"), None

    def _count_end(self, reason: str) -> None:
        self._counters.finished[reason] = self._counters.finished.get(reason, 0) + 1
