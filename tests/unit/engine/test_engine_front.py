"""The asyncio engine streams, refuses, aborts and stops, and survives its callers."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable

import pytest

import shoal.engine.front as front
from shoal.engine.front import AsyncLLM
from shoal.errors import EngineDeadError, QueueFullError, RankError, RequestError
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
        return AsyncLLM("letters")

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
