"""The engine: schedule, execute, update. Holds the truth about every request; ranks are replaceable.

Runs on one thread, the one that calls it. Knows no asyncio and no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from shoal.engine.admission import Admission
from shoal.engine.assemble import Assembly
from shoal.engine.outputs import CompletionDelta, RequestDelta
from shoal.engine.protocol import EngineInfo, EngineStats
from shoal.engine.stops import stop_finder
from shoal.engine.supervisor import RestartPolicy, Supervisor
from shoal.engine.suspects import Suspects
from shoal.engine.text import Tokenizer
from shoal.errors import RankError, RankMemoryError
from shoal.sampling_params import SamplingParams
from shoal.sched.request import BranchUpdate
from shoal.sched.scheduler import Scheduler
from shoal.worker.executor import Executor

__all__ = ["EngineCore"]

_log = logging.getLogger("shoal.engine")
_events = logging.getLogger("shoal.events")


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    replays: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class EngineCore:
    """One engine's requests, from admission to their last delta.

    Args:
        steps_in_flight: 2: while a step is computed, the next one is on its way to the ranks already, and
            what the last one brought is made into text. 1: one after the other.
        restarts: how often the ranks may fail before the engine does.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        admission: Admission,
        info: EngineInfo,
        steps_in_flight: int = 1,
        restarts: RestartPolicy | None = None,
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.info = info
        self._scheduler = scheduler
        self._admission = admission
        self._stop_finder = partial(stop_finder, tokenizer)
        self._steps_in_flight = steps_in_flight
        self._assemblies: dict[str, Assembly] = {}
        self._counters = _Counters()
        self._suspects = Suspects()
        self._was_lowered = False
        self.supervisor = Supervisor(executor, restarts or RestartPolicy())

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Take a request in.

        Returns:
            how many branches it has; of a search, how many are asked for.

        Raises:
            RequestError: it can never be served. Nothing has changed.
            QueueFullError: too many wait. Nothing has changed.
        """
        spec = self._admission.spec(request_id, prompt_ids, params, self._stop_finder)
        branches = self._scheduler.add(spec)
        try:
            self._assemblies[request_id] = Assembly(request_id, branches, self.tokenizer, params)
        except BaseException:
            self._scheduler.abort(request_id)
            raise
        self._admission.num_admitted += 1
        self._counters.prompt_tokens += len(prompt_ids)
        return len(branches)

    def abort(self, request_id: str) -> None:
        """Forget a request, known or not (it may just have ended); no delta of it comes any more."""
        for request in self._scheduler.abort(request_id):
            self._count_end(request.finish_reason or "abort")
        self._assemblies.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_unfinished > 0 or self._scheduler.num_in_flight > 0

    @property
    def can_step(self) -> bool:
        """There is work, and there are ranks for it."""
        return self.has_work and not self.supervisor.is_recovering

    def step(self) -> list[RequestDelta]:
        """Have one step answered; what it brought, at most one delta a request.

        If the ranks fail they are started anew (:meth:`check` says when they serve again), and every
        request goes on from where it was. A request that made them fail again and again is failed.

        Raises:
            EngineDeadError: the ranks failed too often. After this, or any other error, there is no
                further step.
        """
        try:
            updates = self._answered()
        except RankError as error:
            return self._lose(error)
        return self._deltas(updates)

    def _answered(self) -> list[BranchUpdate]:
        """Hand out steps, and take the answer to the oldest in."""
        self._launch()
        if not self._scheduler.num_in_flight:
            return []
        updates = self._scheduler.update(self.executor.collect())
        self._counters.steps += 1
        self.supervisor.worked()
        self._was_lowered = False
        return updates

    def _launch(self) -> None:
        """Hand out steps until as many as may be are in flight, or there is nothing more to do."""
        most = self._steps_in_flight
        if self._suspects.has_any:
            most = self._apart()
        while self._scheduler.num_in_flight < most:
            step = self._scheduler.schedule()
            if step is None:
                return
            self.executor.submit(step)

    def check(self) -> list[RequestDelta]:
        """For moments without a step: see whether the ranks are there, or there again.

        Returns:
            the end of a request that ranks do not survive, if that shows now.

        Raises:
            EngineDeadError: the ranks failed too often.
        """
        if _log.isEnabledFor(logging.DEBUG):
            self.check_integrity()
        lost = self.supervisor.look()
        return [] if lost is None else self._lose(lost)

    def interrupted(self) -> None:
        """After an exception from outside in the middle of a step, such as a Ctrl-C: forget the steps in
        flight. Every unfinished request starts over, on new ranks if these cannot go on.

        Raises:
            EngineDeadError: they cannot, and cannot be started again either.
        """
        self._scheduler.reset()
        self.supervisor.interrupted()

    def _apart(self) -> int:
        """See to it that suspects run apart, if it has come to that; how many steps may be in flight."""
        self._suspects.review()
        if self._scheduler.num_in_flight == 0:
            self._scheduler.restrict(self._suspects.trial)
        return self._steps_in_flight if self._suspects.trial is None else 1

    def _lose(self, cause: RankError) -> list[RequestDelta]:
        """The ranks failed: put every running request back, and have the group started anew."""
        num_running = self._scheduler.stats.num_running
        self._counters.replays += num_running
        is_trial = self._suspects.trial is not None
        lost = self._scheduler.reset()
        _events.warning(
            "%s; starting the ranks anew, %d sequences will be replayed "
            "(in flight: %d in their prompt, %d beyond)",
            cause,
            num_running,
            sum(request.num_output == 0 for request in lost),
            sum(request.num_output > 0 for request in lost),
        )
        deltas: list[RequestDelta] = []
        is_lowered = isinstance(cause, RankMemoryError) and self._lower_budget()
        if lost and not is_lowered:
            guilty = self._suspects.failed(lost)
            self._scheduler.restrict(self._suspects.trial)
            deltas = [] if guilty is None else [self._fail(guilty, cause)]
        self.supervisor.lose(cause, is_counted=not (is_trial or is_lowered))
        return deltas

    def _lower_budget(self) -> bool:
        """After a step that took too much memory: make steps smaller, once until one is answered."""
        if self._was_lowered:
            return False
        budget = self._scheduler.lower_budget()
        if budget is None:
            return False
        self._was_lowered = True
        _events.warning("out of memory: a step has %d tokens at most from now on", budget)
        return True

    def _fail(self, request_id: str, cause: RankError) -> RequestDelta:
        """End a request that the ranks do not survive."""
        _events.error(
            "request %s is failed: the ranks failed whenever it ran, and it alone: %s", request_id, cause
        )
        assembly = self._assemblies.pop(request_id)
        outputs = []
        for request in self._scheduler.abort(request_id, "error"):
            self._count_end("error")
            outputs.append(
                assembly.fail(request.branch, f"the ranks failed whenever this request ran: {cause}")
            )
        return assembly.delta(outputs)

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        scheduler, counters = self._scheduler.stats, self._counters
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_queued_requests=scheduler.num_queued_requests,
            num_queued_tokens=scheduler.num_queued_tokens,
            kv_cache_usage=scheduler.cache_usage,
            kv_cache_window_usage=scheduler.window_cache_usage,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            prefix_cache_queries_total=scheduler.num_prefix_queries,
            prefix_cache_hits_total=scheduler.num_prefix_hits,
            preemptions_total=scheduler.num_preemptions,
            steps_total=counters.steps,
            restarts_total=self.supervisor.num_restarts,
            replays_total=counters.replays,
            requests_total=dict(counters.finished),
        )

    def check_integrity(self) -> None:
        """Assert that blocks, queue, branches and texts agree."""
        self._scheduler.check_integrity()
        assert self._assemblies.keys() == self._scheduler.request_ids, "texts and requests differ"

    def shutdown(self) -> None:
        """Stop the ranks."""
        self.supervisor.stop()
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
        assembly, counters = self._assemblies[request_id], self._counters
        outputs = []
        for update in updates:
            output, stop = self._push(assembly, update)
            counters.generation_tokens += len(output.token_ids)
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
