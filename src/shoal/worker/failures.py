"""What a rank says of an exception, and the exception that the engine makes of it. Knows no process."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator

from shoal.errors import RankError, RankMemoryError, ShoalError, UsageError
from shoal.messages import Failure

__all__ = ["PeerMissedError", "error_of", "failure_of", "inline_errors", "is_out_of_memory"]

_log = logging.getLogger("shoal.worker")

_MEMORY_KINDS = ("MemoryError", "OutOfMemoryError")  # Python's and numpy's; torch's on accelerators
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"  # torch's, which raises RuntimeError on CPUs


class PeerMissedError(RankError):
    """A rank failed because another one did not do its part of a collective."""


def failure_of(rank: int, error: Exception) -> Failure:
    """An exception as it is told to the engine."""
    return Failure(
        rank=rank,
        kind="MemoryError" if is_out_of_memory(error) else type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        usage=isinstance(error, UsageError),
        field=error.field if isinstance(error, UsageError) else None,
    )


def error_of(failure: Failure, rank: int) -> ShoalError:
    """The exception a rank reports, as near to the one it raised as matters to those who handle it."""
    if failure.usage:
        kinds = {kind.__name__: kind for kind in UsageError.__subclasses__()}
        return kinds.get(failure.kind, UsageError)(failure.message, failure.field)
    _log.error("rank %d failed:\n%s", rank, failure.traceback)
    kind = RankError
    if failure.kind in _MEMORY_KINDS:
        kind = RankMemoryError
    elif failure.kind == RankError.__name__:
        kind = PeerMissedError
    return kind(f"rank {rank}: {failure.kind}: {failure.message}", rank)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or this machine, had no more memory to give."""
    return type(error).__name__ in _MEMORY_KINDS or _CPU_ALLOCATOR in str(error)


@contextlib.contextmanager
def inline_errors(rank: int, what: str) -> Iterator[None]:
    """For a rank in this process: what its model's code raises is a rank's failure, as from a process.

    Raises:
        RankError: anything but an error of ours was raised inside.
    """
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # the edge of a rank: model code, torch and numpy raise whatever they like
        kind = RankMemoryError if is_out_of_memory(error) else RankError
        raise kind(f"rank {rank}: {what}: {type(error).__name__}: {error}", rank) from error
