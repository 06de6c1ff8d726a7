"""The engine of an encoder: batch, execute, hand out. The counterpart of :mod:`shoal.engine.core` for texts
of which nothing is kept: what waits longest goes first, as many texts as the token budget holds. Knows no
task and no HTTP.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.engine.encode_tasks import EncoderTasks
from shoal.engine.encode_types import EncodeParams, Encoding
from shoal.engine.protocol import EngineInfo, EngineStats
from shoal.engine.supervisor import RestartPolicy, Supervisor
from shoal.engine.text import Tokenizer
from shoal.errors import QueueFullError, RankError, RequestError
from shoal.messages import Encode, StepResult, pack_ids
from shoal.worker.executor import Executor

__all__ = ["EncodeCore", "EncodeDelta"]

_MOST_FAILURES = 2  # steps that one text may end: the second time it was alone in it


@dataclass(slots=True)
class EncodeDelta:
    """The end of one request."""

    request_id: str
    encoding: Encoding | None
    num_prompt_tokens: int
    error: str | None = None
    finished: bool = True


@dataclass(slots=True)
class _Text:
    request_id: str
    token_ids: Sequence[int]
    params: EncodeParams
    num_failures: int = 0

    def goes_with(self, other: _Text) -> bool:
        """Whether one step may hold both: the same is asked of them, and neither has ended a step."""
        is_same = (self.params.output, self.params.top_k) == (other.params.output, other.params.top_k)
        return is_same and not self.num_failures and not other.num_failures

    @property
    def num_rows(self) -> int:
        """Rows of a step's result that are this text's."""
        if self.params.output == "words":
            return len(self.params.wanted)
        return len(self.token_ids) if self.params.output == "token_classes" else 1


@dataclass(slots=True)
class _Counters:
    tokens: int = 0
    steps: int = 0
    replays: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class EncodeCore:
    """One encoder's requests. Runs on one thread, the one that calls it.

    Args:
        executor: has loaded.
        tasks: makes jobs of what callers ask for.
        max_num_batched_tokens: of one step; a longer text goes alone.
        max_num_seqs: texts of one step.
        max_num_queued_requests: texts that may wait where a call finds room; None: no bound.
        max_num_queued_tokens: the same for their tokens.
        steps_in_flight: steps that ranks have at once.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        info: EngineInfo,
        restarts: RestartPolicy | None = None,
        *,
        tasks: EncoderTasks,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        max_num_queued_requests: int | None = None,
        max_num_queued_tokens: int | None = None,
        steps_in_flight: int = 1,
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.info = info
        self.tasks = tasks
        self.supervisor = Supervisor(executor, restarts or RestartPolicy())
        self._max_tokens = max_num_batched_tokens
        self._max_texts = max_num_seqs
        self._max_waiting = max_num_queued_requests
        self._max_waiting_tokens = max_num_queued_tokens
        self._steps_in_flight = steps_in_flight
        self._waiting: OrderedDict[str, _Text] = OrderedDict()
        self._num_waiting_tokens = 0
        self._in_flight: deque[list[_Text]] = deque()
        self._aborted: set[str] = set()  # of those in flight
        self._next_step = 1
        self._counters = _Counters()

    def submit(self, request_id: str, token_ids: Sequence[int], params: EncodeParams) -> int:
        """Take a text in.

        Returns:
            1, the sequences that it is.

        Raises:
            RequestError: it is longer than the model takes.
            QueueFullError: too many wait.
        """
        if len(token_ids) > self.info.max_model_len:
            raise RequestError(
                f"prompt: has {len(token_ids)} tokens, which exceeds max_model_len "
                f"({self.info.max_model_len}); shorten it or pass truncate_prompt_tokens",
                field="prompt",
            )
        if not params.follows:
            self._require_room()
        self._append(_Text(request_id, token_ids, params))
        return 1

    def abort(self, request_id: str) -> None:
        """Forget a request, known or not; no delta of it comes any more."""
        if request_id in self._waiting:
            self._remove(request_id)
        elif any(text.request_id == request_id for batch in self._in_flight for text in batch):
            self._aborted.add(request_id)
        else:
            return
        self._count_end("abort")

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._in_flight)

    @property
    def can_step(self) -> bool:
        """There is work, and there are ranks for it."""
        return self.has_work and not self.supervisor.is_recovering

    def step(self) -> list[EncodeDelta]:
        """Have one step answered; what it brought. If the ranks fail it brings nothing: they are started
        anew, and its texts wait again, each in a step of its own.

        Raises:
            EngineDeadError: the ranks failed too often. There is no further step.
        """
        try:
            while self._waiting and len(self._in_flight) < self._steps_in_flight:
                self._send(self._next_batch())
            if not self._in_flight:
                return []
            result = self.executor.collect()
        except RankError as error:
            return self._lose(error)
        self._counters.steps += 1
        self.supervisor.worked()
        return self._handed_out(self._in_flight.popleft(), result)

    def check(self) -> list[EncodeDelta]:
        """For moments without a step: see whether the ranks are there, or there again.

        Returns:
            the end of a text that ranks do not survive, if that shows now.

        Raises:
            EngineDeadError: the ranks failed too often.
        """
        lost = self.supervisor.look()
        return [] if lost is None else self._lose(lost)

    def interrupted(self) -> None:
        """After an exception from outside in the middle of a step, such as a Ctrl-C: what was in flight
        waits again, on new ranks if these cannot go on.

        Raises:
            EngineDeadError: they cannot, and cannot be started again either.
        """
        self._put_back()
        self.supervisor.interrupted()

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        counters = self._counters
        return EngineStats(
            num_running=sum(map(len, self._in_flight)),
            num_waiting=len(self._waiting),
            num_queued_requests=len(self._waiting),
            num_queued_tokens=self._num_waiting_tokens,
            prompt_tokens_total=counters.tokens,
            steps_total=counters.steps,
            requests_total=dict(counters.finished),
            restarts_total=self.supervisor.num_restarts,
            replays_total=counters.replays,
        )

    def shutdown(self) -> None:
        """Stop the ranks."""
        self.supervisor.stop()
        self.executor.shutdown()

    def _require_room(self) -> None:
        most, most_tokens = self._max_waiting, self._max_waiting_tokens
        if most is not None and len(self._waiting) >= most:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already (max_num_queued_requests is {most})"
            )
        if most_tokens is not None and self._num_waiting_tokens >= most_tokens:
            raise QueueFullError(
                f"{self._num_waiting_tokens} tokens wait already (max_num_queued_tokens is {most_tokens})"
            )

    def _append(self, text: _Text) -> None:
        self._waiting[text.request_id] = text
        self._num_waiting_tokens += len(text.token_ids)

    def _remove(self, request_id: str) -> _Text:
        text = self._waiting.pop(request_id)
        self._num_waiting_tokens -= len(text.token_ids)
        return text

    def _next_batch(self) -> list[_Text]:
        """What waits longest, and those behind it that go with it, up to the budget."""
        batch: list[_Text] = []
        tokens = 0
        for text in self._waiting.values():
            tokens += len(text.token_ids)
            if batch and (tokens > self._max_tokens or not text.goes_with(batch[0])):
                break
            batch.append(text)
            if len(batch) == self._max_texts:
                break
        for text in batch:
            self._remove(text.request_id)
        return batch

    def _send(self, batch: list[_Text]) -> None:
        first, wanted, start = batch[0].params, list[int](), 0
        has_types = any(text.params.type_ids for text in batch)
        types: list[int] = []
        for text in batch:
            wanted += (start + token for token in text.params.wanted)
            if has_types:
                types += text.params.type_ids or [0] * len(text.token_ids)
            start += len(text.token_ids)
        self._in_flight.append(batch)
        self.executor.submit(
            Encode(
                step_id=self._next_step,
                token_ids=b"".join(pack_ids(text.token_ids) for text in batch),
                lengths=pack_ids(len(text.token_ids) for text in batch),
                output=first.output,
                type_ids=pack_ids(types),
                wanted=pack_ids(wanted),
                top_k=first.top_k,
            )
        )
        self._next_step += 1

    def _handed_out(self, batch: list[_Text], result: StepResult) -> list[EncodeDelta]:
        rows = np.frombuffer(result.rows, np.float32).reshape(-1, result.width)
        ids = np.frombuffer(result.ids, np.int32).reshape(rows.shape) if result.ids else None
        deltas, start = [], 0
        for text in batch:
            stop = start + text.num_rows
            encoding = Encoding(rows[start:stop], None if ids is None else ids[start:stop])
            start = stop
            if text.request_id in self._aborted:
                self._aborted.remove(text.request_id)
                continue
            self._counters.tokens += len(text.token_ids)
            self._count_end("stop")
            deltas.append(EncodeDelta(text.request_id, encoding, len(text.token_ids)))
        return deltas

    def _lose(self, cause: RankError) -> list[EncodeDelta]:
        """The ranks failed: have them started anew; texts that have ended too many steps end here."""
        oldest = self._in_flight[0] if self._in_flight else []
        for text in oldest:
            text.num_failures += 1
        self._counters.replays += len(oldest)
        self._put_back()
        is_known = len(oldest) == 1 and oldest[0].num_failures >= _MOST_FAILURES
        guilty = [text for text in oldest if is_known and text.request_id in self._waiting]
        for text in guilty:
            self._remove(text.request_id)
            self._count_end("error")
        self.supervisor.lose(cause)
        return [EncodeDelta(t.request_id, None, len(t.token_ids), str(cause)) for t in guilty]

    def _put_back(self) -> None:
        for text in [text for batch in self._in_flight for text in batch][::-1]:
            if text.request_id not in self._aborted:
                self._append(text)
                self._waiting.move_to_end(text.request_id, last=False)
        self._in_flight.clear()
        self._aborted.clear()

    def _count_end(self, reason: str) -> None:
        self._counters.finished[reason] = self._counters.finished.get(reason, 0) + 1
