"""An engine without a model: a counting executor and a tokenizer of letters, for tests in milliseconds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from shoal.cache.manager import CacheManager
from shoal.checkpoint.progress import Report
from shoal.engine.admission import Admission
from shoal.engine.core import EngineCore
from shoal.engine.protocol import EngineInfo
from shoal.engine.supervisor import RestartPolicy
from shoal.engine.text import Tokenizer
from shoal.messages import (
    PLACEHOLDER_ID,
    AllocateKV,
    RankReady,
    RankReport,
    SequenceStep,
    Step,
    StepResult,
    TokenResult,
)
from shoal.messages import unpack_ids as ids_of
from shoal.sched.scheduler import Scheduler

VOCABULARY = 128
EOS = ord("z")
FAILS = ord("?")  # a branch that computes it fails


class LetterBackend:
    """Ids are ASCII codes, as far as a transformers tokenizer is needed."""

    all_special_ids: Sequence[int] = ()
    chat_template = "there is one"
    eos_token_id = EOS

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(VOCABULARY)}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(code) for code in ids)

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> str:
        return "".join(message["content"] for message in messages)


class CountingExecutor:
    """The next token is the last one plus 1 (plus the branch): "a" goes on "bcd", branch 1 goes on "ceg"."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.events: list[tuple[str, int]] = []  # ("submit" or "collect", step id)
        self._submitted: deque[Step] = deque()
        self._sampled: dict[int, int] = {}  # by the last step
        self.before: Callable[[], None] = lambda: None  # called in every step: to wait or to raise in
        self.death: Exception | None = None  # what a look between steps finds
        self.num_shutdowns = 0
        self.is_interruptible = False
        self.is_replaceable = True
        self.num_loads = 0  # after failures
        self.at_load: Callable[[], None] = lambda: None  # called in every one: to wait or to raise in

    def load(self, report: Report) -> list[RankReport]:
        return []

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        return []

    def reload(self) -> None:
        self.num_loads += 1
        self._submitted.clear()
        self.at_load()

    def submit(self, step: Step) -> None:
        self.events.append(("submit", step.step_id))
        self._submitted.append(step)

    def collect(self) -> StepResult:
        step = self._submitted.popleft()
        self.events.append(("collect", step.step_id))
        self.steps.append(step)
        self.before()
        sampling = [sequence for sequence in step.sequences if sequence.sampling is not None]
        tokens = tuple(_next(sequence, self._sampled) for sequence in sampling)
        self._sampled = {token.sequence_id: token.token_id for token in tokens}
        return StepResult(step_id=step.step_id, tokens=tokens)

    def check(self) -> None:
        if self.death is not None:
            raise self.death

    def interrupt(self) -> None:
        """Nothing here takes long."""

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def _next(sequence: SequenceStep, sampled: dict[int, int]) -> TokenResult:
    assert sequence.sampling is not None
    last = ids_of(sequence.token_ids)[-1]
    if last == PLACEHOLDER_ID:
        last = max(sampled[sequence.sequence_id], 0)
    if last == FAILS:
        return TokenResult(sequence_id=sequence.sequence_id, error="logits are not finite")
    token = (last + 1 + sequence.sampling.branch) % VOCABULARY
    return TokenResult(
        sequence_id=sequence.sequence_id,
        token_id=token,
        logprob=-0.5,
        rank=2,
        top_ids=(last, token),
        top_logprobs=(-0.25, -0.5),
    )


class Gate:
    """Holds an executor's steps: ``wait_entered`` until one is inside, ``open`` to let all pass."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self._entered.set()
        assert self._open.wait(10)

    def wait_entered(self) -> None:
        assert self._entered.wait(10)

    def open(self) -> None:
        self._open.set()


def make_core(
    executor: CountingExecutor | None = None,
    backend: Any | None = None,
    *,
    has_tokenizer: bool = True,
    max_num_seqs: int = 8,
    max_num_queued_requests: int | None = None,
    steps_in_flight: int = 1,
    restarts: RestartPolicy | None = None,
) -> EngineCore:
    """A core whose sequences hold up to 64 tokens."""
    info = EngineInfo(
        model="letters",
        architecture="Letters",
        max_model_len=64,
        tensor_parallel_size=1,
        num_blocks=64,
        block_size=4,
        attention="none",
        dtype="float32",
        device="cpu",
    )
    scheduler = Scheduler(
        CacheManager(64, 4),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=32,
        max_model_len=64,
        max_num_queued_requests=max_num_queued_requests,
    )
    inner = (backend or LetterBackend()) if has_tokenizer else None
    tokenizer = Tokenizer(inner, vocab_size=VOCABULARY)
    admission = Admission(VOCABULARY, frozenset({EOS}), {}, seed=0, replica_index=0)
    return EngineCore(
        executor or CountingExecutor(), scheduler, tokenizer, admission, info, steps_in_flight, restarts
    )
