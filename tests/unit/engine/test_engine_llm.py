"""The synchronous engine serves lists of prompts, all or none, and stays usable or says why not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

import shoal.engine.llm as module
from shoal.engine.llm import LLM
from shoal.engine.supervisor import RestartPolicy
from shoal.errors import EngineDeadError, EngineError, QueueFullError, RankError, RequestError
from shoal.sampling_params import SamplingParams
from support.engines import CountingExecutor, Gate, make_core

THREE = SamplingParams(max_tokens=3)
Open = Callable[..., LLM]


@pytest.fixture
def executor() -> CountingExecutor:
    return CountingExecutor()


@pytest.fixture
def open_engine(executor: CountingExecutor, monkeypatch: pytest.MonkeyPatch) -> Open:
    def opened(**limits: Any) -> LLM:
        monkeypatch.setattr(module, "launch", lambda config, progress=False: make_core(executor, **limits))
        return LLM("letters")

    return opened


@pytest.fixture
def llm(open_engine: Open) -> LLM:
    return open_engine()


def texts(llm: LLM, *prompts: str, params: SamplingParams = THREE) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(list(prompts), params)]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n) for n in (5, 1, 3)]
    outputs = llm.generate(["a", [65], {"prompt": "f"}], params)
    assert [output.outputs[0].text for output in outputs] == ["bcdef", "B", "ghi"]
    assert [output.prompt for output in outputs] == ["a", None, "f"]
    assert all(output.finished for output in outputs)


def test_one_prompt_needs_no_list_and_no_prompt_gives_nothing(llm: LLM) -> None:
    assert llm.generate("a", THREE)[0].outputs[0].text == "bcd"
    assert llm.generate([97, 98], THREE)[0].outputs[0].text == "cde"
    assert llm.generate([], THREE) == []


def test_conversations_go_through_the_template(llm: LLM) -> None:
    turn = [{"role": "user", "content": "a"}]
    assert [out.outputs[0].text for out in llm.chat(turn, THREE)] == ["bcd"]
    assert [out.outputs[0].text for out in llm.chat([turn, turn], THREE)] == ["bcd", "bcd"]
    with pytest.raises(RequestError, match="messages"):
        llm.chat([])


def test_one_refused_prompt_of_many_leaves_none(llm: LLM) -> None:
    for bad in ("a" * 100, "", [500]):
        with pytest.raises(RequestError):
            llm.generate(["a", "b", bad], THREE)  # type: ignore[list-item]
    assert llm.stats().num_waiting == llm.stats().num_running == 0
    assert texts(llm, "a") == ["bcd"], "and nobody else's output comes up"


def test_params_must_be_as_many_as_the_prompts_and_of_their_type(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 for 1 prompts"):
        llm.generate(["a"], [THREE, THREE])
    with pytest.raises(RequestError, match="must be SamplingParams"):
        llm.generate(["a"], [{"max_tokens": 3}])  # type: ignore[list-item]


def test_more_prompts_than_the_queue_takes_are_refused_together(open_engine: Open) -> None:
    llm = open_engine(max_num_seqs=1, max_num_queued_requests=2)
    with pytest.raises(QueueFullError):
        texts(llm, "a", "b", "c", "d")
    assert texts(llm, "a", "b", "c") == ["bcd", "cde", "def"]


def test_a_failing_branch_is_an_output_that_says_so(llm: LLM) -> None:
    bad, good = llm.generate(["?", "a"], THREE)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].error) == ("error", "logits are not finite")
    assert good.outputs[0].text == "bcd"


def test_on_finish_counts_up(llm: LLM) -> None:
    seen: list[int] = []
    params = [SamplingParams(max_tokens=n) for n in (2, 1)]
    llm.generate(["a", "b"], params, seen.append)
    assert seen == [1, 2]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_callback_that_raises_costs_the_call_and_not_the_engine(llm: LLM, error: BaseException) -> None:
    def fail(_: int) -> None:
        raise error

    with pytest.raises(type(error)):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=20)], fail)
    assert llm.stats().num_running == 0
    assert texts(llm, "a") == ["bcd"]


def test_generate_within_its_own_callback_is_refused(llm: LLM) -> None:
    with pytest.raises(EngineError, match="on_finish"):
        llm.generate(["a"], THREE, lambda _: void(llm.generate("b", THREE)))
    assert texts(llm, "a") == ["bcd"]


class Bar:
    """What is asked of tqdm."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, *, total: int, **_: Any) -> None:
        self.total, self.n, self.is_open = total, 0, True
        Bar.made.append(self)

    def update(self, count: int) -> None:
        self.n += count

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        self.is_open = False


def test_progress_is_shown_where_it_is_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    llm.generate(["a", "b"], THREE, seen.append, use_tqdm=Bar)
    bar = Bar.made.pop()
    assert (bar.total, bar.n, bar.is_open, seen) == (2, 2, False, [1, 2])
    with pytest.raises(RequestError):
        llm.generate(["a", "b"], [THREE, SamplingParams(max_tokens=3, stop_token_ids=[500])], use_tqdm=Bar)
    assert not Bar.made.pop().is_open, "closed whatever happens"
    assert llm.chat([{"role": "user", "content": "a"}], THREE, use_tqdm=Bar) and Bar.made.pop().n == 1
    capsys.readouterr()
    llm.generate(["a", "b"], THREE, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], THREE, use_tqdm=False)
    assert capsys.readouterr().err == ""


def void(_: object) -> None:
    """Callbacks give nothing back."""


def test_dead_ranks_are_told_with_their_cause_ever_after(llm: LLM, executor: CountingExecutor) -> None:
    def die() -> None:
        raise RankError("rank 1 was killed by signal 9", 1)

    executor.before = die
    with pytest.raises(EngineDeadError, match="signal 9") as caught:
        texts(llm, "a")
    assert isinstance(caught.value.__cause__, RankError)
    with pytest.raises(EngineDeadError, match="signal 9"):
        texts(llm, "a")
    assert executor.num_shutdowns == 1
    llm.shutdown()


def test_an_interrupt_within_a_step_costs_the_ranks_and_not_the_engine(
    llm: LLM, executor: CountingExecutor
) -> None:
    """Its answer may still come, and could not be told from a later step's: so there are new ranks."""

    def interrupt() -> None:
        executor.before = lambda: None
        raise KeyboardInterrupt

    executor.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        texts(llm, "a")
    assert texts(llm, "a") == ["bcd"]
    assert executor.num_loads == 1 and executor.num_shutdowns == 0


def test_an_interrupt_within_a_step_ends_an_engine_whose_ranks_are_not_its_own(
    llm: LLM, executor: CountingExecutor
) -> None:
    executor.is_replaceable = False

    def interrupt() -> None:
        raise KeyboardInterrupt

    executor.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        texts(llm, "a")
    assert executor.num_shutdowns == 1
    with pytest.raises(EngineDeadError, match="interrupted"):
        texts(llm, "a")


def test_an_interrupt_within_a_step_of_a_rank_in_this_process_costs_only_the_request(
    llm: LLM, executor: CountingExecutor
) -> None:
    executor.is_interruptible = True

    def interrupt() -> None:
        executor.before = lambda: None
        raise KeyboardInterrupt

    executor.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        texts(llm, "a")
    assert executor.num_shutdowns == 0
    assert texts(llm, "a") == texts(llm, "a")
    assert llm.stats().num_running == 0


def test_a_lost_step_is_no_ones_loss(open_engine: Open, executor: CountingExecutor) -> None:
    llm = open_engine(restarts=RestartPolicy(1))

    def die() -> None:
        if len(executor.steps) == 2:
            raise RankError("rank 1 was killed by signal 9", 1)

    executor.before = die
    assert texts(llm, "a", "A") == ["bcd", "BCD"]
    stats = llm.stats()
    assert (executor.num_loads, stats.restarts_total, stats.replays_total) == (1, 1, 2)
    assert stats.generation_tokens_total == 6 and stats.requests_total == {"length": 2}


def test_an_engine_that_is_shut_down_while_it_recovers_ends_its_call(
    open_engine: Open, executor: CountingExecutor
) -> None:
    llm = open_engine(restarts=RestartPolicy(1))
    gate = executor.at_load = Gate()
    executor.before = fail
    ended: list[BaseException] = []

    def generate() -> None:
        try:
            texts(llm, "a")
        except EngineDeadError as error:
            ended.append(error)

    running = threading.Thread(target=generate)
    running.start()
    gate.wait_entered()
    stopping = threading.Thread(target=llm.shutdown)
    stopping.start()
    running.join(10)
    gate.open()
    stopping.join(10)
    assert "shut down" in str(ended[0]) and executor.num_shutdowns == 1


def fail() -> None:
    raise RankError("rank 1 was killed by signal 9", 1)


def test_a_refused_prompt_of_several_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt") as caught:
        llm.generate(["a", "", "b"])
    assert caught.value.index == 1


def test_shut_down_twice_is_once(llm: LLM, executor: CountingExecutor) -> None:
    with llm:
        texts(llm, "a")
        llm.shutdown()
    llm.shutdown()
    assert executor.num_shutdowns == 1
    for use in (lambda: texts(llm, "a"), lambda: llm.info, llm.stats):
        with pytest.raises(EngineDeadError, match="shut down"):
            use()


def test_shutdown_from_another_thread_ends_a_running_call(llm: LLM, executor: CountingExecutor) -> None:
    gate = executor.before = Gate()
    ended: list[BaseException] = []

    def generate() -> None:
        try:
            texts(llm, "a", params=SamplingParams(max_tokens=20))
        except EngineDeadError as error:
            ended.append(error)

    running = threading.Thread(target=generate)
    running.start()
    gate.wait_entered()
    stopping = threading.Thread(target=llm.shutdown)
    stopping.start()
    while not llm._is_stopping:
        pass
    assert executor.num_shutdowns == 0, "not in the middle of a step"
    gate.open()
    running.join(10)
    stopping.join(10)
    assert "shut down" in str(ended[0])
    assert executor.num_shutdowns == 1 and len(executor.steps) == 1


def test_two_threads_take_turns(llm: LLM) -> None:
    got: dict[str, list[str]] = {}

    def client(letter: str) -> None:
        for _ in range(10):
            got.setdefault(letter, []).extend(texts(llm, letter, letter))

    threads = [threading.Thread(target=client, args=(letter,)) for letter in "aA"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == {"a": ["bcd"] * 20, "A": ["BCD"] * 20}


def test_an_engine_nobody_refers_to_stops_its_ranks(open_engine: Open, executor: CountingExecutor) -> None:
    llm = open_engine()
    texts(llm, "a")
    del llm
    gc.collect()
    assert executor.num_shutdowns == 1
