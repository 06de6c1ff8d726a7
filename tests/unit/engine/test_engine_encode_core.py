"""``EncodeCore``: how texts share steps, what is refused, and what becomes of them when ranks fail."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.engine.encode_core import EncodeCore, EncodeDelta
from shoal.engine.encode_types import EncodeParams
from shoal.engine.protocol import EngineInfo
from shoal.engine.supervisor import RestartPolicy
from shoal.engine.text import Tokenizer
from shoal.errors import EngineDeadError, QueueFullError, RankError, RequestError
from shoal.messages import Encode, StepResult, pack_ids, unpack_ids

INFO = EngineInfo("m", "M", 20, 1, 0, 16, "none", "float32", "cpu")
POISON = 13


class SumExecutor:
    """A text's vector is (sum of its ids, number of tokens); a step with :data:`POISON` kills the ranks."""

    computes_apart = False
    is_interruptible = True
    is_replaceable = True

    def __init__(self) -> None:
        self.steps: list[list[list[int]]] = []
        self.seen: list[Encode] = []
        self._submitted: deque[Encode] = deque()
        self.num_reloads = 0

    def submit(self, step: Any) -> None:
        self._submitted.append(step)

    def collect(self) -> StepResult:
        step = self._submitted.popleft()
        ids, texts, start = unpack_ids(step.token_ids).tolist(), [], 0
        for length in unpack_ids(step.lengths).tolist():
            texts.append(ids[start : start + length])
            start += length
        self.seen.append(step)
        self.steps.append(texts)
        if POISON in ids:
            self._submitted.clear()
            raise RankError("rank 0 died of 13", 0)
        if step.output == "words":
            rows = np.array([[ids[at], 0.5] for at in unpack_ids(step.wanted)], np.float32)
            words = pack_ids(range(rows.size))
            return StepResult(step_id=step.step_id, rows=rows.tobytes(), width=2, ids=words)
        rows = np.array([[sum(text), len(text)] for text in texts], np.float32)
        return StepResult(step_id=step.step_id, rows=rows.tobytes(), width=2)

    def reload(self) -> None:
        self.num_reloads += 1

    def check(self) -> None: ...

    def interrupt(self) -> None: ...

    def shutdown(self) -> None: ...


def make_core(executor: SumExecutor, **options: Any) -> EncodeCore:
    tasks: Any = SimpleNamespace()
    policy = RestartPolicy(max_restarts=5, window_s=60)
    defaults: dict[str, Any] = {"max_num_batched_tokens": 10}
    return EncodeCore(
        executor,  # type: ignore[arg-type]
        Tokenizer(None, vocab_size=100),
        INFO,
        policy,
        tasks=tasks,
        **{**defaults, **options},
    )


def drain(core: EncodeCore) -> dict[str, EncodeDelta]:
    """Step until nothing is left; what every request got."""
    found: dict[str, EncodeDelta] = {}
    deadline = time.monotonic() + 20
    while core.has_work:
        assert time.monotonic() < deadline
        if core.supervisor.is_recovering:
            core.supervisor.wait(1)
            core.check()
            continue
        for delta in core.step():
            assert delta.request_id not in found
            found[delta.request_id] = delta
    return found


def rows_of(delta: EncodeDelta) -> list[list[float]]:
    assert delta.encoding is not None
    return delta.encoding.rows.tolist()


def test_texts_go_in_order_as_many_as_the_budget_holds() -> None:
    executor = SumExecutor()
    core = make_core(executor, max_num_seqs=3)
    for index, length in enumerate((4, 4, 3, 12, 1, 1, 1, 1)):
        core.submit(str(index), [index] * length, EncodeParams())
    found = drain(core)
    assert [[len(text) for text in texts] for texts in executor.steps] == [[4, 4], [3], [12], [1, 1, 1], [1]]
    assert {name: rows_of(delta) for name, delta in found.items()} == {
        str(index): [[index * length, length]] for index, length in enumerate((4, 4, 3, 12, 1, 1, 1, 1))
    }
    stats = core.stats()
    assert stats.prompt_tokens_total == 27 and stats.steps_total == 5
    assert stats.requests_total == {"stop": 8} and stats.num_waiting == 0


def test_what_is_asked_for_differently_is_another_step_and_words_go_to_their_texts() -> None:
    executor = SumExecutor()
    core = make_core(executor)
    core.submit("a", [5, 6], EncodeParams("words", wanted=(1,), top_k=2))
    core.submit("b", [7, 8, 9], EncodeParams("words", wanted=(0, 2), top_k=2))
    core.submit("c", [1], EncodeParams())
    found = drain(core)
    assert len(executor.steps) == 2
    assert rows_of(found["a"]) == [[6, 0.5]] and rows_of(found["b"]) == [[7, 0.5], [9, 0.5]]
    assert found["b"].encoding is not None and found["b"].encoding.ids is not None
    assert found["b"].encoding.ids.tolist() == [[2, 3], [4, 5]]


def test_token_types_of_some_are_zeros_for_the_others() -> None:
    executor = SumExecutor()
    core = make_core(executor)
    core.submit("a", [5, 6], EncodeParams())
    core.submit("b", [7, 8], EncodeParams(type_ids=(0, 1)))
    drain(core)
    assert unpack_ids(executor.seen[0].type_ids).tolist() == [0, 0, 0, 1]


def test_too_long_and_too_many_are_refused() -> None:
    core = make_core(SumExecutor(), max_num_queued_requests=1)
    with pytest.raises(RequestError, match=r"21 tokens.*max_model_len"):
        core.submit("a", [1] * 21, EncodeParams())
    core.submit("b", [1], EncodeParams())
    with pytest.raises(QueueFullError):
        core.submit("c", [1], EncodeParams())


def test_texts_of_a_call_that_found_room_are_all_let_in() -> None:
    core = make_core(SumExecutor(), max_num_queued_requests=2, max_num_queued_tokens=5)
    core.submit("a", [1, 2, 3], EncodeParams())
    for name in "bc":
        core.submit(name, [1, 2, 3], EncodeParams(follows=True))
    with pytest.raises(QueueFullError, match="max_num_queued_requests is 2"):
        core.submit("d", [1], EncodeParams())
    for name in "cba":
        core.abort(name)
    assert core.stats().num_queued_tokens == 0
    core.submit("j", [1] * 6, EncodeParams())
    with pytest.raises(QueueFullError, match=r"6 tokens wait already \(max_num_queued_tokens is 5"):
        core.submit("k", [1], EncodeParams())


def test_an_aborted_text_is_not_answered() -> None:
    core = make_core(SumExecutor())
    core.submit("a", [1], EncodeParams())
    core.submit("b", [2], EncodeParams())
    core.abort("a")
    core.abort("unknown")
    assert list(drain(core)) == ["b"]
    assert core.stats().requests_total == {"abort": 1, "stop": 1}


def test_ranks_that_fail_are_started_anew_and_only_the_text_that_kills_them_fails() -> None:
    executor = SumExecutor()
    core = make_core(executor)
    for name, ids in (("a", [1, 2]), ("bad", [3, POISON]), ("c", [4]), ("d", [5] * 8)):
        core.submit(name, ids, EncodeParams())
    found = drain(core)
    assert executor.num_reloads == 2  # with others, then alone
    assert found["bad"].encoding is None and "died of 13" in (found["bad"].error or "")
    assert {name: rows_of(found[name]) for name in ("a", "c", "d")} == {
        "a": [[3, 2]], "c": [[4, 1]], "d": [[40, 8]],
    }  # fmt: skip
    assert core.stats().requests_total == {"error": 1, "stop": 3}


def test_ranks_that_fail_too_often_are_the_engines_end() -> None:
    executor = SumExecutor()
    core = make_core(executor)
    core.supervisor._policy = RestartPolicy(max_restarts=0, window_s=60)
    core.submit("bad", [POISON], EncodeParams())
    with pytest.raises(EngineDeadError, match="died of 13"):
        core.step()
