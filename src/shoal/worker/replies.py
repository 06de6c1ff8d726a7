"""One answer from every rank, or the reason why there is none. Knows channels; no process and no request.

When one rank fails, its peers soon fail too, for want of it: whoever is heard first is not always who is at
fault. So a failure of that kind is not believed at once; the cause gets a moment to be heard.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import msgspec

from shoal.checkpoint.progress import Report
from shoal.errors import RankError
from shoal.messages import Failure, LoadProgress, Message, Ping, RankReady, RankReport, StepResult
from shoal.worker.channel import Channel
from shoal.worker.failures import PeerMissedError, error_of

__all__ = ["Answer", "gather_replies", "late", "pings_answered"]

_CAUSE_S = 1.0  # how long the cause of a failure may take to be heard after its first consequence
_CAUSE_SHARE = 0.1  # and of the time for an answer at most this much
_LOOK_S = 0.3  # between two looks at ranks that may take long

Answer = TypeVar("Answer", RankReport, RankReady, StepResult)
Expected = TypeVar("Expected", RankReport, RankReady, StepResult, Ping)


def gather_replies(
    channels: Mapping[int, Channel],
    answer: type[Answer],
    timeout_s: float,
    gone: Callable[[int], str],
    report: Report | None = None,
    watch: Callable[[], None] | None = None,
) -> list[Answer]:
    """One answer from every channel, in rank order.

    Args:
        channels: by rank.
        gone: what to say of the rank whose end closed.
        report: told how far all of them together are.
        watch: called a few times a second meanwhile; what it raises ends the waiting.

    Raises:
        UsageError: a rank says that the user's input is wrong.
        RankError: a rank failed, closed its channel, or did not answer in time. Where several did, the
            one that is at fault as far as can be told.
    """
    replies: dict[int, Answer] = {}
    shares = {rank: LoadProgress(done=0, total=0) for rank in channels}
    missed: PeerMissedError | None = None
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank, channel in channels.items():
            selector.register(channel, selectors.EVENT_READ, rank)
        while silent := sorted(cast(int, key.data) for key in selector.get_map().values()):
            ready = _ready(selector, deadline, watch)
            if not ready:
                raise late(silent, timeout_s) if missed is None else _named(silent, missed)
            for rank in ready:
                try:
                    message = _receive(channels[rank], rank, deadline, gone)
                    if isinstance(message, LoadProgress):
                        shares[rank] = message
                        _tell(report, shares)
                        continue
                    if isinstance(message, Ping):
                        continue
                    replies[rank] = _expect(message, rank, answer)
                except PeerMissedError as error:
                    missed = missed or error
                    deadline = min(deadline, time.monotonic() + min(_CAUSE_S, _CAUSE_SHARE * timeout_s))
                selector.unregister(channels[rank])
    if missed is not None:
        raise missed
    return [replies[rank] for rank in sorted(replies)]


def pings_answered(channels: Mapping[int, Channel], gone: Callable[[int], str]) -> set[int]:
    """Ranks that have answered a ping by now; nobody is waited for.

    Raises:
        RankError: a rank failed, or closed its channel.
    """
    answered = set()
    with selectors.DefaultSelector() as selector:
        for rank, channel in channels.items():
            selector.register(channel, selectors.EVENT_READ, rank)
        for rank in [cast(int, key.data) for key, _ in selector.select(0)]:
            _expect(_receive(channels[rank], rank, time.monotonic() + _CAUSE_S, gone), rank, Ping)
            answered.add(rank)
    return answered


def late(silent: Sequence[int], timeout_s: float) -> RankError:
    """What to say of ranks that did not answer in time."""
    named = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
    only = silent[0] if len(silent) == 1 else None
    return RankError(f"{named} did not answer within {timeout_s:g} s", only)


def _ready(selector: selectors.BaseSelector, deadline: float, watch: Callable[[], None] | None) -> list[int]:
    """Ranks that say something; none once the deadline is over."""
    while (left := deadline - time.monotonic()) > 0:
        ready = [
            cast(int, key.data) for key, _ in selector.select(left if watch is None else min(left, _LOOK_S))
        ]
        if ready or watch is None:
            return ready
        watch()
    return []


def _tell(report: Report | None, shares: Mapping[int, LoadProgress]) -> None:
    if report is not None:
        report(sum(s.done for s in shares.values()), sum(s.total for s in shares.values()))


def _named(silent: Sequence[int], missed: PeerMissedError) -> RankError:
    """Which ranks others waited for in vain."""
    if len(silent) == 1:
        return RankError(f"rank {silent[0]} did not do its part: {missed}", silent[0])
    return RankError(f"ranks {', '.join(map(str, silent))} did not do their part: {missed}")


def _receive(channel: Channel, rank: int, deadline: float, gone: Callable[[int], str]) -> Message:
    try:
        return channel.receive(max(deadline - time.monotonic(), 1e-3))
    except EOFError as error:
        raise RankError(gone(rank), rank) from error
    except TimeoutError as error:
        raise RankError(f"rank {rank} stopped in the middle of an answer", rank) from error
    except msgspec.DecodeError as error:
        raise RankError(f"rank {rank} sent what is no message: {error}", rank) from error


def _expect(message: Message, rank: int, answer: type[Expected]) -> Expected:
    if isinstance(message, Failure):
        raise error_of(message, rank)
    if not isinstance(message, answer):
        raise RankError(f"rank {rank} answered with {type(message).__name__}", rank)
    return message
