"""Ranks that torchrun started: every one runs the user's script, rank 0 drives, the others serve.

Rank 0 computes its own part in its own process and talks to the others over loopback sockets, whose address
and key travel through the process group. Knows no request.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections import deque

import torch

from shoal.checkpoint.progress import Report
from shoal.comm.torch_dist import TorchComm, connect, torchrun_place
from shoal.errors import EngineError, RankError
from shoal.messages import AllocateKV, Encode, RankReady, RankReport, Shutdown, Step, StepResult, encode
from shoal.worker.channel import Channel
from shoal.worker.failures import inline_errors
from shoal.worker.load import Load, make_starts
from shoal.worker.rank import RankWorker
from shoal.worker.replies import Answer, gather_replies
from shoal.worker.serve import serve

__all__ = ["TorchrunExecutor", "serve_rank", "torchrun_place"]

_KEY_BYTES = 16
_MEETING_TIMEOUT_S = 600.0
_SHUTDOWN_S = 10.0


class TorchrunExecutor:
    """Rank 0's end: one rank in this process, the rest behind sockets."""

    computes_apart = False  # rank 0 computes on the caller's thread
    is_interruptible = False
    is_replaceable = False  # they are torchrun's

    def __init__(self, load: Load) -> None:
        self._load = load
        self._worker = RankWorker()
        self._control: TorchComm | None = None
        self._channels: dict[int, Channel] = {}  # by rank, from 1
        self._submitted: deque[Step | Encode] = deque()

    def load(self, report: Report) -> list[RankReport]:
        self._control = _control_group()
        self._channels = _accept(self._control, self._load.world_size - 1)
        first, *others = make_starts(self._load, "")
        for start in others:
            self._send(start.rank, encode(start), self._load.load_timeout_s)
        with inline_errors(0, "loading"):
            own = self._worker.start(first, report)
        return [own, *self._replies(RankReport, self._load.load_timeout_s)]

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        self._broadcast(message, self._load.load_timeout_s)
        with inline_errors(0, f"making {message.num_blocks} KV blocks"):
            own = self._worker.allocate(message)
        self._load = self._load.serving(message)
        return [own, *self._replies(RankReady, self._load.load_timeout_s)]

    def reload(self) -> None:
        raise EngineError("ranks that torchrun started cannot be started anew")

    def submit(self, step: Step | Encode) -> None:
        self._broadcast(step, self._load.step_timeout_s)
        self._submitted.append(step)

    def collect(self) -> StepResult:
        """Compute this rank's part, on this thread, and hear of the others'."""
        step = self._submitted.popleft()
        with inline_errors(0, f"step {step.step_id}"):
            result = self._worker.execute(step)
        self._replies(StepResult, self._load.step_timeout_s)
        return result

    def check(self) -> None:
        """torchrun itself ends all its ranks when one dies."""

    def interrupt(self) -> None:
        """Ranks that are never started again need no interrupting."""

    def shutdown(self) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # a rank that is gone needs no telling
                channel.send(Shutdown(), _SHUTDOWN_S)
            channel.close()
        self._channels = {}
        self._worker.close()
        if self._control is not None:
            self._control.close()
            self._control = None

    def _broadcast(self, message: AllocateKV | Step | Encode, timeout_s: float) -> None:
        if not self._channels:
            raise EngineError("the executor is not running")
        data = encode(message)
        for rank in self._channels:
            self._send(rank, data, timeout_s)

    def _send(self, rank: int, data: bytes, timeout_s: float) -> None:
        try:
            self._channels[rank].send_bytes(data, timeout_s)
        except OSError as error:
            raise RankError(f"rank {rank} is gone, or takes nothing in", rank) from error

    def _replies(self, answer: type[Answer], timeout_s: float) -> list[Answer]:
        return gather_replies(self._channels, answer, timeout_s, lambda rank: f"rank {rank} is gone")


def serve_rank() -> None:
    """Serve steps until rank 0 shuts the engine down. For ranks above 0 of a torchrun script."""
    control = _control_group()
    key, port = _meeting_point(control, None)
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(key + control.rank.to_bytes(4, "little"))
    serve(Channel(sock))
    sock.close()
    control.close()


def _control_group() -> TorchComm:
    return connect(0, 0, "", torch.device("cpu"), _MEETING_TIMEOUT_S)


def _meeting_point(control: TorchComm, ours: tuple[bytes, int] | None) -> tuple[bytes, int]:
    """Rank 0's key and port, on every rank."""
    data = torch.zeros(_KEY_BYTES + 4, dtype=torch.uint8)
    if ours is not None:
        data = torch.tensor(list(ours[0] + ours[1].to_bytes(4, "little")), dtype=torch.uint8)
    received = bytes(control.broadcast(data).tolist())
    return received[:_KEY_BYTES], int.from_bytes(received[_KEY_BYTES:], "little")


def _accept(control: TorchComm, count: int) -> dict[int, Channel]:
    """Channels to ranks 1 to ``count``; strangers without the key are turned away."""
    channels: dict[int, Channel] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_MEETING_TIMEOUT_S)
        key = secrets.token_bytes(_KEY_BYTES)
        _meeting_point(control, (key, server.getsockname()[1]))
        while len(channels) < count:
            try:
                sock, _ = server.accept()
            except TimeoutError as error:
                raise RankError(f"{count - len(channels)} ranks did not come") from error
            sock.settimeout(_MEETING_TIMEOUT_S)
            greeting = sock.recv(_KEY_BYTES + 4, socket.MSG_WAITALL)
            if not secrets.compare_digest(greeting[:_KEY_BYTES], key):
                sock.close()
                continue
            channels[int.from_bytes(greeting[_KEY_BYTES:], "little")] = Channel(sock)
    return channels
