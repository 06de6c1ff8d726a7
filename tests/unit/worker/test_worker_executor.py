"""Executors turn whatever befalls a rank into one of our errors, and leave nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

import shoal.worker.executor as module
from shoal.errors import CheckpointError, EngineError, RankError
from shoal.messages import AllocateKV, SequenceStep, Step, StepResult, TokenResult
from shoal.worker.channel import Channel
from shoal.worker.executor import InlineExecutor, ProcessExecutor
from shoal.worker.load import Load, make_starts
from support.loads import execute

STEP = Step(step_id=7, sequences=())
PAGES = AllocateKV(num_blocks=9, block_size=4)


def load(ranks: int = 2, timeout_s: float = 10) -> Load:
    return Load({}, "folder", {"plan": 1}, ranks, load_timeout_s=timeout_s, step_timeout_s=timeout_s)


def ignore(done: float, total: float) -> None:
    """Progress nobody looks at."""


def test_each_rank_is_told_which_one_it_is() -> None:
    starts = make_starts(load(3), "127.0.0.1:5")
    assert [start.rank for start in starts] == [0, 1, 2]
    assert {(start.world_size, start.rendezvous, start.model_path) for start in starts} == {
        (3, "127.0.0.1:5", "folder")
    }


class Worker:
    """Raises ``error`` whatever it is asked."""

    error: Exception

    def start(self, *_: Any) -> Any:
        raise self.error

    allocate = execute = start

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> InlineExecutor:
    monkeypatch.setattr(module, "RankWorker", Worker)
    executor = InlineExecutor(load(1))
    executor._worker = Worker()  # type: ignore[assignment]
    return executor


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyError("x"), MemoryError("x"), TypeError("x")])
def test_whatever_model_code_raises_inline_is_a_ranks_failure(
    inline: InlineExecutor, error: Exception
) -> None:
    Worker.error = error
    kind = type(error).__name__
    with pytest.raises(RankError, match=f"rank 0: step 7: {kind}") as caught:
        execute(inline, STEP)
    assert caught.value.__cause__ is error and caught.value.rank == 0
    with pytest.raises(RankError, match=f"making 9 KV blocks: {kind}"):
        inline.allocate(PAGES)
    with pytest.raises(RankError, match=f"loading: {kind}"):
        inline.load(ignore)


def test_wrong_input_inline_stays_what_it_is(inline: InlineExecutor) -> None:
    Worker.error = CheckpointError("model: shard 2 is cut short", field="model")
    with pytest.raises(CheckpointError, match="shard 2"):
        inline.load(ignore)


@pytest.mark.parametrize("kind", [InlineExecutor, ProcessExecutor])
def test_an_executor_that_does_not_run_says_so(kind: type[InlineExecutor | ProcessExecutor]) -> None:
    executor = kind(load(1))
    for ask in (lambda: execute(executor, STEP), lambda: executor.allocate(PAGES)):
        with pytest.raises(EngineError, match="not running"):
            ask()
    executor.check()
    executor.shutdown()
    executor.shutdown()


def spawning(monkeypatch: pytest.MonkeyPatch, *programs: str | None) -> list[subprocess.Popen[bytes]]:
    """Have ranks run these programs instead of shoal's; None: the process cannot be started."""
    spawned: list[subprocess.Popen[bytes]] = []
    left = list(programs)

    def spawn(channel_fd: int, life_fd: int) -> subprocess.Popen[bytes]:
        program = left.pop(0)
        if program is None:
            raise OSError(11, "Resource temporarily unavailable")
        begin = f"import os, socket, time; s = socket.socket(fileno={channel_fd}); life = {life_fd}\n"
        command = [sys.executable, "-S", "-c", begin + program]
        spawned.append(subprocess.Popen(command, pass_fds=(channel_fd, life_fd)))
        return spawned[-1]

    monkeypatch.setattr("shoal.worker.rank_process._spawn", spawn)
    return spawned


SLEEPS = "time.sleep(60)"


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    """Neither descriptors nor children are left by any test of this file."""
    module.open_store()  # the first store of a process leaves libuv's own pipe open for good
    process = psutil.Process()
    before, others = process.num_fds(), set(process.children())  # other tests' ranks may live on
    yield
    assert process.num_fds() <= before
    assert set(process.children()) <= others


def test_a_process_that_cannot_be_started_takes_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = spawning(monkeypatch, SLEEPS, None)
    with pytest.raises(OSError, match="temporarily unavailable"):
        ProcessExecutor(load()).load(ignore)
    assert spawned[0].returncode == -9


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("raise SystemExit(3)", "rank 1 exited with status 3"),
        ("os.kill(os.getpid(), 9)", "rank 1 was killed by signal 9"),
        ("s.recv(8); os.kill(os.getpid(), 11)", "rank 1 was killed by signal 11"),
    ],
)
def test_a_rank_that_dies_while_loading_is_named_with_how(
    program: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned = spawning(monkeypatch, SLEEPS, program)
    with pytest.raises(RankError) as caught:
        ProcessExecutor(load()).load(ignore)
    assert (str(caught.value), caught.value.rank) == (how, 1)
    assert spawned[0].returncode == -9, "its peer is not left waiting"


def test_a_rank_that_never_loads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = spawning(monkeypatch, SLEEPS)
    with pytest.raises(RankError, match=r"rank 0 did not answer within 0\.2 s"):
        ProcessExecutor(load(1, 0.2)).load(ignore)
    assert spawned[0].returncode == -9


def running(monkeypatch: pytest.MonkeyPatch, *programs: str) -> ProcessExecutor:
    """An executor as if its ranks had loaded."""
    spawning(monkeypatch, *programs)
    executor = ProcessExecutor(load(len(programs), 0.3))
    executor._ranks = [module.RankProcess(rank) for rank in range(len(programs))]
    return executor


def test_a_rank_that_takes_nothing_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step larger than the socket's buffer, to a process that hangs."""
    executor = running(monkeypatch, SLEEPS)
    big = module.encode(STEP) + bytes(8 << 20)
    monkeypatch.setattr(module, "encode", lambda message: big)
    with pytest.raises(RankError, match=r"rank 0 took nothing in for 0\.27 s"):
        execute(executor, STEP)
    executor.shutdown()


def test_an_interrupt_while_waiting_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = running(monkeypatch, SLEEPS)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "gather_replies", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(executor, STEP)
    with pytest.raises(EngineError, match="not running"):
        execute(executor, STEP)
    executor.shutdown()


def test_a_look_between_steps_finds_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = running(monkeypatch, SLEEPS, SLEEPS)
    executor.check()
    victim = executor._ranks[1].process
    victim.kill()
    victim.wait()
    with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
        executor.check()
    executor.shutdown()


def test_a_forked_child_leaves_the_ranks_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = running(monkeypatch, SLEEPS)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        executor.shutdown()
        with pytest.raises(EngineError, match="fork"):
            execute(executor, STEP)
    assert executor._ranks[0].process.poll() is None
    monkeypatch.setattr(module, "_SHUTDOWN_S", 0.1)
    executor.shutdown()


def test_a_rank_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = running(monkeypatch, SLEEPS, "s.recv(100)")
    processes = [rank.process for rank in executor._ranks]
    monkeypatch.setattr(module, "_SHUTDOWN_S", 3.0)
    executor.shutdown()
    assert [process.returncode for process in processes] == [-9, 0]


class Peer:
    """A rank's end as the executor holds it, in this process."""

    rank = 0
    process = subprocess

    def __init__(self, sock: socket.socket) -> None:
        self.channel = Channel(sock)

    def obituary(self) -> str:
        return "is a thread"


def test_large_steps_and_large_answers_do_not_wait_for_each_other() -> None:
    """Each is more than a socket holds: a rank that sends one answer cannot take the next step in."""
    ours, theirs = socket.socketpair()
    executor = ProcessExecutor(load(1, timeout_s=20))
    executor._ranks = [Peer(ours)]  # type: ignore[list-item]
    steps = [large_step(number) for number in range(3)]
    tokens = tuple(TokenResult(sequence_id=n, top_ids=tuple(range(50))) for n in range(20_000))

    def answer() -> None:
        channel = Channel(theirs)
        for step in steps:
            assert channel.receive(20) == step
            channel.send(StepResult(step_id=step.step_id, tokens=tokens), 20)

    with ours, theirs, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer)
        executor.submit(steps[0])
        for number in range(3):
            if number < 2:
                executor.submit(steps[number + 1])
            assert executor.collect().step_id == number
        answering.result(20)


def large_step(number: int) -> Step:
    sequence = SequenceStep(sequence_id=number, start=0, token_ids=bytes(1 << 20), block_ids=b"")
    return Step(step_id=number, sequences=(sequence,))
