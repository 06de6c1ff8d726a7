"""One rank that measures collectives: ``python -m shoal.bench.comm_rank``, started by :mod:`.comm` only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.process.life import die_with_parent

if TYPE_CHECKING:
    import torch

    from shoal.comm.base import Comm

__all__ = ["main"]

_TURN = 20  # calls of one transport before the next has its turn


def main() -> None:
    """Carry out the order that comes over the channel."""
    socket_fd, life_fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(life_fd)
    # Only now: importing torch takes seconds, in which the parent may die.
    from shoal.process.frames import Frames

    frames = Frames(socket.socket(fileno=socket_fd))
    try:
        answer: dict[str, Any] = {"rows": _measure(json.loads(frames.receive_bytes()))}
    except Exception as error:  # the process boundary: the parent says what happened
        answer = {"error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):  # nobody is left to tell
        frames.send_bytes(json.dumps(answer).encode())
    os._exit(0)  # the threads of gloo abort a process that ends in the usual way


def _measure(order: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    from shoal.comm.choose import join_private_group

    torch.set_num_threads(1)
    ranks, device = order["ranks"], torch.device("cpu")
    groups: dict[str, Comm] = {
        backend: join_private_group(
            order["rank"], ranks, order["meetings"][backend], device, order["timeout_s"], backend
        )
        for backend in order["backends"]
    }
    rows = []
    for operation in order["operations"]:
        for size in order["sizes"]:
            calls = {name: _call(operation, comm, size) for name, comm in groups.items()}
            times = _times(calls, order["repeats"])
            rows += [_row(name, operation, size, ranks, taken) for name, taken in times.items()]
    return rows


def _call(operation: str, comm: Comm, size: int) -> Callable[[], torch.Tensor]:
    """The collective on a tensor of its own, kept from one call to the next."""
    import torch

    count = size // 4
    if operation == "all_reduce":
        tensor = torch.zeros(count)
        return lambda: comm.all_reduce(tensor)
    if operation == "broadcast":
        tensor = torch.zeros(count)
        return lambda: comm.broadcast(tensor)
    shard, sizes = torch.zeros(count // comm.size), [count // comm.size] * comm.size
    return lambda: comm.all_gather(shard, sizes)


def _times(calls: dict[str, Callable[[], torch.Tensor]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, sorted. The transports take turns; the first calls of a turn do not count: ranks
    come from the turn before at different times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for begun in range(0, repeats, _TURN):
        for name, call in calls.items():
            for index in range(-2, min(_TURN, repeats - begun)):
                started = time.perf_counter()
                call()
                if index >= 0:
                    times[name].append(time.perf_counter() - started)
    return {name: sorted(taken) for name, taken in times.items()}


def _row(name: str, operation: str, size: int, ranks: int, times: list[float]) -> dict[str, Any]:
    median, p90 = times[len(times) // 2], times[len(times) * 9 // 10]
    return {
        "backend": name,
        "op": operation,
        "bytes": size,
        "ranks": ranks,
        "median_us": round(median * 1e6, 3),
        "p90_us": round(p90 * 1e6, 3),
        "gbytes_per_s": round(size / median / 1e9, 4),
    }


if __name__ == "__main__":
    main()
