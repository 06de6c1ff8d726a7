"""Four real processes that run named jobs, for a whole test run. Knows no model.

Groups of the first 2, 3 and 4 ranks are made once (gloo over loopback) and kept. A job is a function
``job(comm, *arguments)`` of an importable module, run by every rank of a group. A job that fails, or that
does not end in time, costs its caller an error and the processes their lives: the next finds fresh ones.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.torch_dist import TorchComm, connect, open_store, use_loopback

__all__ = ["RankPool", "RankPoolError"]

SIZE = 4
START_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 60.0
_GRACE_S = 2.0  # for the other ranks' answers, once one has failed


class RankPoolError(Exception):
    """A job failed on a rank, or did not end in time; the message says which rank and how."""


class RankPool:
    """Processes that wait for jobs."""

    def __init__(self) -> None:
        self._members: list[_Member] = []

    def run(
        self, job: Callable[..., Any], *arguments: Any, ranks: int, timeout_s: float = JOB_TIMEOUT_S
    ) -> list[Any]:
        """Each rank's result, rank 0's first.

        Args:
            job: a module's function; its first argument is the rank's end of the group.
            arguments: further ones, the same for all ranks; they and the results are pickled.
            ranks: 2, 3 or 4.

        Raises:
            RankPoolError: a rank failed, or was not ready in time.
        """
        if not self._members:
            self._start()
        members = self._members[:ranks]
        for member in members:
            member.connection.send_bytes(pickle.dumps((job.__module__, job.__qualname__, ranks, arguments)))
        return self._answers(members, timeout_s)

    def close(self) -> None:
        """End the processes."""
        for member in self._members:
            member.connection.close()  # its end of file ends the rank
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(10)
            member.process.kill()
            member.process.wait()
        self._members = []

    def _start(self) -> None:
        store, rendezvous = open_store()
        self._members = [_Member(rank, rendezvous) for rank in range(SIZE)]
        self._answers(self._members, START_TIMEOUT_S)
        del store  # every rank has met the others

    def _answers(self, members: list[_Member], timeout_s: float) -> list[Any]:
        """One answer of each; anything but success restarts the pool."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(answers) + len(failures) < len(members):
            waiting = [m for m in members if m.rank not in answers and m.rank not in failures]
            ready = wait([m.connection for m in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for member in (m for m in waiting if m.connection in ready):
                is_right, value = member.receive()
                (answers if is_right else failures)[member.rank] = value
                if not is_right:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        missing = [m.rank for m in members if m.rank not in answers and m.rank not in failures]
        if failures or missing:
            self._kill()
            said = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
            raise RankPoolError("\n".join([*said, *(f"rank {rank} did not answer" for rank in missing)]))
        return [answers[member.rank] for member in members]

    def _kill(self) -> None:
        for member in self._members:
            member.process.kill()
            member.process.wait()
            member.connection.close()
        self._members = []


class _Member:
    """One process and the pipe to it."""

    def __init__(self, rank: int, rendezvous: str) -> None:
        self.rank = rank
        self.connection, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        environment["TRANSFORMERS_VERBOSITY"] = "error"  # what is fast on a GPU is no news here
        use_loopback(environment)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(rank), rendezvous]
        self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def receive(self) -> tuple[bool, Any]:
        """(whether it went well, the result or what went wrong)."""
        try:
            return pickle.loads(self.connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            return False, f"died with status {self.process.wait()}"


def _serve(connection: Connection, rank: int, rendezvous: str) -> None:
    """A rank's life: join, make the groups, run jobs until the pipe is closed."""
    torch.set_num_threads(1)
    world = connect(rank, SIZE, rendezvous, torch.device("cpu"), JOB_TIMEOUT_S)
    groups: dict[int, TorchComm] = {SIZE: world}
    for size in range(2, SIZE):
        group = dist.new_group(range(size), timeout=timedelta(seconds=JOB_TIMEOUT_S))
        if rank < size:
            groups[size] = TorchComm(group)
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            # Not recv(): torch teaches it to pass tensors as shared memory.
            module, name, size, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            job = getattr(importlib.import_module(module), name)
            answer = True, job(groups[size], *arguments)
        except Exception:  # a job may fail in any way; its caller is told
            answer = False, traceback.format_exc(limit=-4)  # the end of it: where it went wrong
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
    os._exit(0)  # gloo's threads may abort a process that ends in order
