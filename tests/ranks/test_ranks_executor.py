"""Ranks as processes: the same answers as threads, and whoever dies, hangs or cannot load is named."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from shoal.device.cpu import usable_cores
from shoal.errors import CheckpointError, EngineError, RankError, UsageError
from shoal.messages import AllocateKV, StepResult
from shoal.worker.executor import Executor, ProcessExecutor
from shoal.worker.load import Load
from support import families
from support.loads import execute, make_load, make_step
from support.programs import are_gone, wait_until
from support.threads import ThreadExecutor

PAGES = AllocateKV(num_blocks=32, block_size=4)
STEP_TIMEOUT_S = 3.0
needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or usable_cores() < max(2, len(os.sched_getaffinity(0))),
    reason="nothing is pinned without affinity masks, on one core, or under a quota",
)
PROMPTS = families.prompts(2, 20, seed=8)


def ignore(done: float, total: float) -> None:
    """Progress nobody looks at."""


@pytest.fixture(scope="module")
def load(families_path: Path) -> Load:
    return make_load(families.save("llama_9_3", families_path), 2, step_timeout=STEP_TIMEOUT_S)


def start(load: Load) -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(load)
    executor.load(ignore)
    executor.allocate(PAGES)
    yield executor
    executor.shutdown()


@pytest.fixture(scope="module")
def running(load: Load) -> Iterator[ProcessExecutor]:
    """One group for all tests that want it as it is at first."""
    yield from start(load)


@pytest.fixture
def living(running: ProcessExecutor) -> ProcessExecutor:
    """The same, started anew if the test before has cost it its ranks."""
    if not running._ranks:
        running.reload()
    return running


def pids(executor: ProcessExecutor) -> list[psutil.Process]:
    return [psutil.Process(rank.process.pid) for rank in executor._ranks]


def run(executor: Executor, num_steps: int = 5) -> list[list[tuple[int, int, str | None]]]:
    """Two prompts and what follows: (sequence, token, error) by step."""
    out = []
    tokens: Sequence[Sequence[int]] = PROMPTS
    starts = [0, 0]
    for number in range(num_steps):
        result: StepResult = execute(executor, make_step(number, *zip(starts, tokens, strict=True)))
        out.append([(token.sequence_id, token.token_id, token.error) for token in result.tokens])
        starts = [start + len(ids) for start, ids in zip(starts, tokens, strict=True)]
        ordered = sorted(result.tokens, key=lambda token: token.sequence_id)
        tokens = [[token.token_id] for token in ordered]
    return out


def test_processes_give_what_threads_give_and_so_do_those_that_come_after_them(
    load: Load, running: ProcessExecutor
) -> None:
    threads = ThreadExecutor(load)
    threads.load(ignore)
    threads.allocate(PAGES)
    try:
        wanted = [sorted(step) for step in run(threads)]
        assert [sorted(step) for step in run(running)] == wanted
        pids(running)[0].kill()
        with pytest.raises(RankError, match="rank 0 was killed by signal 9"):
            run(running)
        running.reload()
        assert [sorted(step) for step in run(running)] == wanted
    finally:
        threads.shutdown()


@needs_cores
def test_ranks_keep_to_cores_of_their_own(running: ProcessExecutor) -> None:
    first, second = (os.sched_getaffinity(rank.pid) for rank in pids(running))
    assert len(first) == len(second) == 1 and first != second


@needs_cores
@pytest.mark.parametrize("pinning", ["auto", "off"])
def test_a_ranks_threads_have_a_core_each_unless_that_is_off(pinning: str, families_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    folder = families.save("llama_9_3", families_path)
    for executor in start(make_load(folder, 1, num_threads=2, cpu_pinning=pinning)):
        rank = pids(executor)[0]
        cores = [os.sched_getaffinity(thread.id) for thread in rank.threads()]
        assert run(executor, 2)
    own = sorted(mine)[-2:]
    if pinning == "auto":
        assert os.sched_getaffinity(0) == mine
        assert {own[0]} in cores and {own[1]} in cores
    else:
        assert all(core == mine for core in cores)


def test_a_killed_rank_is_noticed_within_a_second_and_its_peer_is_gone(running: ProcessExecutor) -> None:
    ranks = pids(running)
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(ranks[1].pid, signal.SIGKILL)

    timer = threading.Timer(0.2, kill)
    timer.start()
    with pytest.raises(RankError, match="rank 1 was killed by signal 9") as caught:
        while True:
            run(running)
    assert time.monotonic() - killed_at[0] < 1
    assert caught.value.rank == 1
    wait_until(lambda: are_gone(ranks), 10, "the whole group ends")


def test_a_rank_that_hangs_is_noticed_at_the_step_timeout_and_named(living: ProcessExecutor) -> None:
    ranks = pids(living)
    ranks[1].suspend()
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 did not do its part") as caught:
        run(living)
    assert time.monotonic() - started < STEP_TIMEOUT_S
    assert caught.value.rank == 1
    wait_until(lambda: are_gone(ranks), 10, "the whole group ends")


def test_wrong_input_seen_by_one_rank_only_is_raised_at_once(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other rank waits for it in a collective, and would until the load timeout."""
    from shoal.worker import executor as module
    from shoal.worker import rank_process

    def starts(load: Load, rendezvous: str, generation: int) -> object:
        first, second = make_starts(load, rendezvous, generation)
        return [first, type(second)(**{**_fields(second), "model_path": str(damaged)})]

    make_starts = module.make_starts
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in Path(load.model_path).iterdir():
        data = file.read_bytes()
        is_weights = file.suffix == ".safetensors"
        (damaged / file.name).write_bytes(data[: len(data) // 2] if is_weights else data)
    monkeypatch.setattr(module, "make_starts", starts)
    spawned: list[psutil.Process] = []
    monkeypatch.setattr(rank_process, "_spawn", _noting(rank_process._spawn, spawned))
    executor = ProcessExecutor(dataclasses.replace(load, load_timeout_s=60))
    started = time.monotonic()
    with pytest.raises(UsageError) as caught:
        executor.load(ignore)
    assert type(caught.value) is CheckpointError
    assert time.monotonic() - started < 40
    assert len(spawned) == 2 and are_gone(spawned)


def _fields(start: object) -> dict[str, object]:
    return {name: getattr(start, name) for name in start.__struct_fields__}  # type: ignore[attr-defined]


def _noting(spawn: object, spawned: list[psutil.Process]) -> object:
    def noting(channel_fd: int, life_fd: int) -> object:
        process = spawn(channel_fd, life_fd)  # type: ignore[operator]
        spawned.append(psutil.Process(process.pid))
        return process

    return noting


def test_an_idle_rank_that_stops_is_noticed_within_the_step_timeout(living: ProcessExecutor) -> None:
    living.check()
    pids(living)[1].suspend()
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 did not answer") as caught:
        while time.monotonic() - started < 2 * STEP_TIMEOUT_S:
            living.check()
            time.sleep(0.1)
    assert time.monotonic() - started < STEP_TIMEOUT_S
    assert caught.value.rank == 1


@pytest.mark.slow
def test_ranks_on_standby_take_the_place_of_those_that_are_lost(load: Load) -> None:
    executor = ProcessExecutor(dataclasses.replace(load, config={**load.config, "standby_ranks": True}))
    executor.load(ignore)
    try:
        executor.allocate(PAGES)
        wanted = run(executor)
        executor.check()
        waiting = [process.process.pid for process in executor._standby._waiting.values()]
        os.kill(pids(executor)[0].pid, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 0 was killed by signal 9"):
            run(executor)
        for process in executor._standby._waiting.values():  # they have imported all when they say so
            assert select.select([process.channel], [], [], 120)[0]
        executor.reload()
        assert [process.pid for process in pids(executor)] == waiting
        assert run(executor) == wanted
        executor.check()
        waiting_again = [psutil.Process(each.process.pid) for each in executor._standby._waiting.values()]
        assert len(waiting_again) == 2
    finally:
        executor.shutdown()
    assert are_gone(waiting_again)


def test_a_start_under_way_can_be_interrupted(load: Load) -> None:
    executor = ProcessExecutor(load)
    pause = threading.Event()
    ended: list[Exception] = []

    def start() -> None:
        try:
            executor.load(ignore)
        except EngineError as error:
            ended.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    while not executor._ranks and starting.is_alive():
        pause.wait(0.01)
    executor.interrupt()
    starting.join(10)
    assert not starting.is_alive() and len(ended) == 1
    executor.shutdown()
