"""One answer from every rank, or the reason why there is none. Knows channels; no process and no request.

When one rank fails, its peers soon fail too, for want of it: whoever is heard first is not always who is at
fault. So a failure of that kind is not believed at once; the cause gets a moment to be heard.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from shoal.checkpoint.progress import Report
from shoal.errors import RankError, ShoalError, UsageError
from shoal.messages import Failure, LoadProgress, Message, RankReady, RankReport, StepResult
from shoal.worker.channel import Channel

__all__ = ["Answer", "gather_replies"]

_log = logging.getLogger("shoal.worker")

_CAUSE_S = 1.0  # how long the cause of a failure may take to be heard after its first consequence

Answer = TypeVar("Answer", RankReport, RankReady, StepResult)


class _PeerMissed(RankError):
    """A rank failed because another one did not do its part of a collective."""


def gather_replies(
    channels: Mapping[int, Channel],
    answer: type[Answer],
    timeout_s: float,
    gone: Callable[[int], str],
    report: Report | None = None,
) -> list[Answer]:
    """One answer from every channel, in rank order.

    Args:
        channels: by rank.
        gone: what to say of the rank whose end closed.
        report: told how far all of them together are.

    Raises:
        UsageError: a rank says that the user's input is wrong.
        RankError: a rank failed, closed its channel, or did not answer in time. Where several did, the
            one that is at fault as far as can be told.
    """
    replies: dict[int, Answer] = {}
    shares = {rank: LoadProgress(done=0, total=0) for rank in channels}
    missed: _PeerMissed | None = None
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank, channel in channels.items():
            selector.register(channel, selectors.EVENT_READ, rank)
        while silent := sorted(cast(int, key.data) for key in selector.get_map().values()):
            ready = _ready(selector, deadline)
            if not ready:
                raise _late(silent, timeout_s, missed)
            for rank in ready:
                try:
                    message = _receive(channels[rank], rank, deadline, gone)
                    if isinstance(message, LoadProgress):
                        shares[rank] = message
                        _tell(report, shares)
                        continue
                    replies[rank] = _expect(message, rank, answer)
                except _PeerMissed as error:
                    missed = missed or error
                    deadline = min(deadline, time.monotonic() + _CAUSE_S)
                selector.unregister(channels[rank])
    if missed is not None:
        raise missed
    return [replies[rank] for rank in sorted(replies)]


def _ready(selector: selectors.BaseSelector, deadline: float) -> list[int]:
    """Ranks that say something; none once the deadline is over."""
    left = deadline - time.monotonic()
    return [cast(int, key.data) for key, _ in selector.select(left)] if left > 0 else []


def _tell(report: Report | None, shares: Mapping[int, LoadProgress]) -> None:
    if report is not None:
        report(sum(s.done for s in shares.values()), sum(s.total for s in shares.values()))


def _late(silent: Sequence[int], timeout_s: float, missed: _PeerMissed | None) -> RankError:
    named = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
    only = silent[0] if len(silent) == 1 else None
    if missed is not None:
        return RankError(f"{named} did not do its part: {missed}", only)
    return RankError(f"{named} did not answer within {timeout_s:g} s", only)


def _receive(channel: Channel, rank: int, deadline: float, gone: Callable[[int], str]) -> Message:
    try:
        return channel.receive(max(deadline - time.monotonic(), 1e-3))
    except EOFError as error:
        raise RankError(gone(rank), rank) from error
    except TimeoutError as error:
        raise RankError(f"rank {rank} stopped in the middle of an answer", rank) from error


def _expect(message: Message, rank: int, answer: type[Answer]) -> Answer:
    if isinstance(message, Failure):
        raise _raised(message, rank)
    if not isinstance(message, answer):
        raise RankError(f"rank {rank} answered with {type(message).__name__}", rank)
    return message


def _raised(failure: Failure, rank: int) -> ShoalError:
    """The exception a rank reports, as near to the one it raised as matters to those who handle it."""
    if failure.usage:
        kinds = {kind.__name__: kind for kind in UsageError.__subclasses__()}
        return kinds.get(failure.kind, UsageError)(failure.message, failure.field)
    _log.error("rank %d failed:\n%s", rank, failure.traceback)
    kind = _PeerMissed if failure.kind == RankError.__name__ else RankError
    return kind(f"rank {rank}: {failure.kind}: {failure.message}", rank)
