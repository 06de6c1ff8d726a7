"""The asyncio engine streams, refuses, aborts and stops, and survives its callers."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

import shoal.engine.front as front
from shoal.engine.front import AsyncLLM
from shoal.errors import EngineDeadError, EngineError, QueueFullError, RankError, RequestError
from shoal.sampling_params import SamplingParams
from support.engines import CountingExecutor, Gate, make_core

LONG = SamplingParams(max_tokens=20)
Open = Callable[..., AsyncLLM]


@pytest.fixture
def executor() -> CountingExecutor:
    return CountingExecutor()


@pytest.fixture
def open_engine(executor: CountingExecutor, monkeypatch: pytest.MonkeyPatch) -> Open:
    def opened(**limits: int) -> AsyncLLM:
        monkeypatch.setattr(front, "launch", lambda config, progress=False: make_core(executor, **limits))
        return AsyncLLM("letters", max_num_queued_requests=limits.get("max_num_queued_requests"))

    return opened


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


def void(_: object) -> None:
    """Gives nothing back."""


async def text_of(engine: AsyncLLM, prompt: str, params: SamplingParams) -> str:
    return "".join([delta.outputs[0].text async for delta in engine.stream(prompt, params)])


def test_streams_run_side_by_side(open_engine: Open) -> None:
    async def test() -> None:
        engine = open_engine()
        params = SamplingParams(max_tokens=3)
        assert await asyncio.gather(*(text_of(engine, p, params) for p in "aAf")) == ["bcd", "BCD", "ghi"]
        await engine.shutdown()

    run(test)


def test_started_without_blocking_the_loop(open_engine: Open) -> None:
    async def test() -> None:
        open_engine().stats()
        engine = await AsyncLLM.start("letters")
        assert engine.info.model == "letters" and engine.is_ready
        await engine.shutdown()

    run(test)


def test_generate_gives_outputs_that_grow(open_engine: Open) -> None:
    async def test() -> None:
        engine = open_engine()
        outputs = [output async for output in engine.generate("a", SamplingParams(max_tokens=3))]
        assert [output.outputs[0].text for output in outputs] == ["b", "bc", "bcd"]
        assert [output.finished for output in outputs] == [False, False, True]
        assert outputs[0].prompt == "a"
        await engine.shutdown()

    run(test)


def test_refusals_come_at_the_first_step_of_the_iterator(
    open_engine: Open, executor: CountingExecutor
) -> None:
    async def test() -> None:
        engine = open_engine(max_num_seqs=1, max_num_queued_requests=1)
        for prompt in ("", "a" * 100):
            with pytest.raises(RequestError):
                await anext(aiter(engine.stream(prompt, LONG)))
        with pytest.raises(RequestError, match="sampling_params"):
            await anext(aiter(engine.stream("a", {"max_tokens": 1})))  # type: ignore[arg-type]
        gate = executor.before = Gate()
        running = asyncio.ensure_future(text_of(engine, "A", LONG))
        await asyncio.to_thread(gate.wait_entered)
        waiting, refused = (asyncio.ensure_future(text_of(engine, "A", LONG)) for _ in range(2))
        await asyncio.sleep(0)  # both are submitted
        gate.open()
        with pytest.raises(QueueFullError):
            await refused
        assert await running == await waiting == "BCDEFGHIJKLMNOPQRSTU"
        await engine.shutdown()

    run(test)


def test_a_full_queue_is_known_before_a_prompt_is_read_and_says_when_to_come_again(
    open_engine: Open, executor: CountingExecutor
) -> None:
    async def test() -> None:
        engine = open_engine(max_num_seqs=1, max_num_queued_requests=1)
        engine.require_room()
        gate = executor.before = Gate()
        running = asyncio.ensure_future(text_of(engine, "A", LONG))
        await asyncio.to_thread(gate.wait_entered)
        waiting, refused = (asyncio.ensure_future(text_of(engine, "A", LONG)) for _ in range(2))
        await asyncio.sleep(0)
        executor.before = second = Gate()
        gate.open()
        await asyncio.to_thread(second.wait_entered)
        with pytest.raises(QueueFullError, match="max_num_queued_requests is 1") as early:
            engine.require_room()
        assert early.value.retry_after_s == 1.0  # nothing is known of its pace yet
        second.open()
        with pytest.raises(QueueFullError):
            await refused
        await asyncio.gather(running, waiting)
        engine.require_room()
        await engine.shutdown()

    run(test)


def test_more_prompts_than_run_and_wait_are_no_matter_of_coming_again(open_engine: Open) -> None:
    async def test() -> None:
        engine = open_engine(max_num_queued_requests=2)  # and 256 run
        engine.require_room(258)
        engine.require_room(3, 128)  # the last one finds two places taken
        for num_prompts, num_branches in ((259, 1), (4, 128)):
            with pytest.raises(RequestError, match="max_num_queued_requests 2") as refused:
                engine.require_room(num_prompts, num_branches)
            assert refused.value.field == "prompt"
        await engine.shutdown()

    run(test)


@pytest.mark.parametrize("prompt", ["a" * 65, [97] * 65, {"prompt_token_ids": [97] * 65}])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    open_engine: Open, prompt: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        engine = open_engine()
        template = SimpleNamespace(chat_text=lambda messages, **_: "".join(messages), encode_chat=None)
        monkeypatch.setattr(engine, "_tokenizer", template)
        with pytest.raises(RequestError, match=r"has 65 (characters|tokens).* shorten it"):
            await anext(aiter(engine.stream(prompt, LONG)))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="messages: has 66 characters") as refused:
            engine.render_chat(["a" * 33] * 2)  # type: ignore[list-item]
        assert refused.value.field == "messages"
        await engine.shutdown()

    run(test)


def test_a_reader_that_stops_reading_loses_its_request_and_nobody_elses(
    open_engine: Open, executor: CountingExecutor
) -> None:
    async def test() -> None:
        engine = open_engine()
        steps = threading.Semaphore(1)
        executor.before = lambda: void(steps.acquire(timeout=10))
        slow = engine.stream("A", LONG, max_unread=4)
        assert (await anext(slow)).outputs[0].text == "B"
        steps.release(1000)
        assert await text_of(engine, "a", LONG) == "bcdefghijklmnopqrstu"
        with pytest.raises(EngineError, match="left 4 parts"):
            await anext(slow)
        patient = engine.stream("A", LONG)
        assert (await anext(patient)).outputs[0].text == "B"
        assert await text_of(engine, "a", LONG) == "bcdefghijklmnopqrstu"
        assert "".join([delta.outputs[0].text async for delta in patient]) == "CDEFGHIJKLMNOPQRSTU"
        assert engine.stats().num_running == 0 and engine.stats().kv_cache_usage == 0
        await engine.shutdown()

    run(test)


def test_an_id_is_refused_while_it_runs_and_free_as_soon_as_it_was_aborted(
    open_engine: Open, executor: CountingExecutor
) -> None:
    async def test() -> None:
        engine = open_engine()
        steps = threading.Semaphore(3)
        executor.before = lambda: void(steps.acquire(timeout=0.1))  # slow: it runs for seconds
        first = engine.stream("a", LONG, "same")
        await anext(first)
        with pytest.raises(RequestError, match="'same' is still being served"):
            await anext(aiter(engine.stream("A", LONG, "same")))
        await first.aclose()
        steps.release(1000)
        again = [delta.outputs[0].text async for delta in engine.stream("A", LONG, "same")]
        assert "".join(again) == "BCDEFGHIJKLMNOPQRSTU"
        await engine.shutdown()

    run(test)


def test_aborts_that_race_with_the_end_leave_nothing_behind(
    open_engine: Open, executor: CountingExecutor
) -> None:
    async def test() -> None:
        engine = open_engine()
        for number in range(60):
            stream = engine.stream("a", SamplingParams(max_tokens=3), "same")
            for _ in range(number % 4):  # before the first token, between tokens, at and after the end
                if (await anext(stream)).finished:
                    break
            await stream.aclose()
        assert await text_of(engine, "a", SamplingParams(max_tokens=3)) == "bcd"
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
        await engine.shutdown()

    run(test)


def test_closing_or_cancelling_a_stream_aborts_its_request(
    open_engine: Open, executor: CountingExecutor
) -> None:
    async def test() -> None:
        engine = open_engine()
        steps = threading.Semaphore(1)
        executor.before = lambda: void(steps.acquire(timeout=10))
        closed = engine.stream("a", LONG)
        await anext(closed)
        cancelled = asyncio.ensure_future(text_of(engine, "A", LONG))
        await asyncio.sleep(0)  # it is submitted; the engine stands in its second step
        await closed.aclose()
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        steps.release(100)
        assert await text_of(engine, "f", SamplingParams(max_tokens=1)) == "g"
        assert engine.stats().requests_total == {"abort": 2, "length": 1}
        assert engine.stats().kv_cache_usage == 0
        await engine.shutdown()

    run(test)


def test_shutdown_lets_running_requests_finish_and_refuses_new_ones(
    open_engine: Open, executor: CountingExecutor
) -> None:
    async def test() -> None:
        engine = open_engine()
        gate = executor.before = Gate()
        running = asyncio.ensure_future(text_of(engine, "a", SamplingParams(max_tokens=3)))
        await asyncio.to_thread(gate.wait_entered)
        stopping = asyncio.ensure_future(engine.shutdown(10))
        await asyncio.sleep(0)
        assert not engine.is_ready and engine.is_alive
        with pytest.raises(EngineDeadError, match="shutting down"):
            await text_of(engine, "b", LONG)
        gate.open()
        assert await running == "bcd"
        await stopping
        await engine.shutdown()
        assert executor.num_shutdowns == 1 and not engine.is_alive

    run(test)


def test_shutdown_without_patience_ends_running_requests(
    open_engine: Open, executor: CountingExecutor
) -> None:
    async def test() -> None:
        engine = open_engine()
        gate = executor.before = Gate()
        running = asyncio.ensure_future(text_of(engine, "a", LONG))
        await asyncio.to_thread(gate.wait_entered)
        stopping = asyncio.ensure_future(engine.shutdown())
        await asyncio.sleep(0.05)
        gate.open()
        with pytest.raises(EngineDeadError, match="shut down"):
            await running
        await stopping

    run(test)


def test_dead_ranks_end_every_stream_with_the_cause(open_engine: Open, executor: CountingExecutor) -> None:
    async def test() -> None:
        engine = open_engine()

        def die() -> None:
            raise RankError("rank 1 was killed by signal 9", 1)

        executor.before = die
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="signal 9"):
                await text_of(engine, "a", LONG)
        assert not engine.is_ready and not engine.is_alive
        assert "signal 9" in await engine.died()
        await engine.shutdown()

    run(test)


def test_an_event_loop_that_closes_does_not_take_the_engine_along(
    open_engine: Open, executor: CountingExecutor
) -> None:
    engine = open_engine()
    gate = executor.before = Gate()
    loop = asyncio.new_event_loop()
    # A stream cannot be left behind unclosed by asyncio.run; its sink, as it is, can.
    engine._loop.submit("left", [97], LONG, lambda item: void(loop.call_soon_threadsafe(print, item)))
    gate.wait_entered()
    loop.close()
    gate.open()

    async def test() -> None:
        assert await text_of(engine, "a", SamplingParams(max_tokens=3)) == "bcd"
        assert engine.is_ready
        await engine.shutdown()

    run(test)


def test_a_dropped_engine_stops_its_thread_and_its_ranks(
    open_engine: Open, executor: CountingExecutor
) -> None:
    engine = open_engine()
    before = {thread for thread in threading.enumerate() if thread.name == "shoal-engine"}
    del engine
    gc.collect()
    assert executor.num_shutdowns == 1
    assert not any(thread.is_alive() for thread in before)


def test_as_a_context_manager_it_shuts_down_at_the_end(open_engine: Open, executor: CountingExecutor) -> None:
    async def test() -> None:
        async with open_engine() as engine:
            assert await text_of(engine, "a", SamplingParams(max_tokens=2)) == "bc"
        assert not engine.is_alive
        assert executor.num_shutdowns == 1

    run(test)
