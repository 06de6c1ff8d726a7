"""A rank's message loop. Knows how to answer, not what the answers mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from shoal.checkpoint.progress import Report
from shoal.messages import (
    AllocateKV,
    Encode,
    LoadProgress,
    Message,
    Ping,
    RankReady,
    Shutdown,
    Start,
    Step,
)
from shoal.worker.channel import Channel
from shoal.worker.failures import failure_of
from shoal.worker.rank import RankWorker

__all__ = ["serve"]


def serve(channel: Channel, on_ready: Callable[[], None] = lambda: None, may_pin: bool = False) -> None:
    """Answer messages until a shutdown, a closed channel, or a failure.

    A failure is reported and ends the rank: its peers may hang in a collective, so the group is lost
    and the executor starts a new one.

    Args:
        on_ready: called once all is loaded and made, before that is answered: steps come next.
        may_pin: whether this process is the rank's own, so that its threads may be kept to some cores.
    """
    worker = RankWorker(may_pin=may_pin)
    rank = -1
    try:
        while True:
            try:
                message = channel.receive()
            except EOFError:
                return
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Start):
                rank = message.rank
            answer = _answer(worker, message, channel)
            if isinstance(answer, RankReady):
                on_ready()
            channel.send(answer)
    except Exception as error:  # the process boundary: everything is reported to the engine, then it ends
        with contextlib.suppress(OSError):  # nobody is left to report to
            channel.send(failure_of(rank, error))
    finally:
        worker.close()


def _answer(worker: RankWorker, message: Message, channel: Channel) -> Message:
    match message:
        case Start():
            return worker.start(message, _reporter(channel))
        case Ping():
            return worker.ping(message)
        case AllocateKV():
            return worker.allocate(message)
        case Step() | Encode():
            return worker.execute(message)
    raise TypeError(f"a rank does not take {type(message).__name__}")


def _reporter(channel: Channel) -> Report:
    """Sends progress on, a hundred times at most however often it is called."""
    sent = -1

    def report(done: float, total: float) -> None:
        nonlocal sent
        percent = int(100 * done / total) if total else 100
        if percent > sent:
            sent = percent
            channel.send(LoadProgress(done=done, total=total))

    return report
