"""The members of one model's group, as their leader sees them: processes, what they say, and what became of
them. Knows no model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.errors import RankError, UsageError
from shoal.parallel.words import Failed
from shoal.process.child import Child, spawn
from shoal.process.frames import Frames

__all__ = ["Crew"]

_EXIT_S = 2.0  # how long members may take to leave once the channel is closed
_log = logging.getLogger("shoal.parallel")


class Crew:
    """The processes of ranks 1 to ``size - 1``, started at once.

    Args:
        size: ranks in all, this process included.
    """

    def __init__(self, size: int) -> None:
        self._owner = os.getpid()
        self._children: dict[int, Child] = {}
        self.frames: dict[int, Frames] = {}
        try:
            for rank in range(1, size):
                child = Child(lambda fd, life: spawn("shoal.parallel.member", fd, life, dict(os.environ)))
                self._children[rank] = child
                self.frames[rank] = Frames(child.socket)
        except BaseException:
            self.stop(0)
            raise

    @property
    def is_ours(self) -> bool:
        """Whether this process started them; a fork of it must leave them alone."""
        return os.getpid() == self._owner

    def tell(self, data: bytes, timeout_s: float, ranks: Sequence[int] | None = None) -> None:
        """Send one frame to all members, or to some.

        Raises:
            RankError: one of them is gone, or takes nothing in.
        """
        for rank in self.frames if ranks is None else ranks:
            with self.talking_to(rank):
                self.frames[rank].send_bytes(data, timeout_s)

    @contextlib.contextmanager
    def talking_to(self, rank: int) -> Iterator[None]:
        """Inside, a channel's failure is the member's.

        Raises:
            RankError: it is gone, or takes nothing in.
        """
        try:
            yield
        except TimeoutError as error:
            raise RankError(f"rank {rank} takes nothing in", rank) from error
        except OSError as error:
            raise RankError(self.obituary(rank), rank) from error

    def hear(self, timeout_s: float) -> dict[int, Any]:
        """One word from each member; in place of the word of one that is gone or silent, a RankError."""
        deadline = time.monotonic() + timeout_s
        words: dict[int, Any] = {}
        for rank, frames in self.frames.items():
            try:
                words[rank] = pickle.loads(frames.receive_bytes(max(deadline - time.monotonic(), 1e-3)))
            except TimeoutError:
                words[rank] = RankError(f"rank {rank} did not answer within {timeout_s:g} s", rank)
            except EOFError:
                words[rank] = RankError(self.obituary(rank), rank)
            if isinstance(words[rank], Failed):
                _log.debug("rank %d failed:\n%s", rank, words[rank].traceback)
        return words

    def expect(self, kind: type[Any], timeout_s: float) -> None:
        """Have every member say one word.

        Raises:
            UsageError: a member says that the user's input is wrong.
            RankError: a member failed, is gone or is silent.
        """
        for rank, word in self.hear(timeout_s).items():
            if isinstance(word, RankError):
                raise word
            if isinstance(word, Failed):
                kinds = {usage.__name__: usage for usage in UsageError.__subclasses__()}
                if word.kind in kinds:
                    raise kinds[word.kind](word.message)
                raise RankError(f"rank {rank}: {word.kind}: {word.message}", rank)
            if not isinstance(word, kind):
                raise RankError(f"rank {rank} answered with {type(word).__name__}", rank)

    def obituary(self, rank: int) -> str:
        """What became of a member whose channel is closed."""
        return f"rank {rank} {self._children[rank].obituary()}"

    def dead(self) -> int | None:
        """A member whose process has ended, if there is one."""
        return next((r for r, child in self._children.items() if child.process.poll() is not None), None)

    def stop(self, wait_s: float = _EXIT_S) -> None:
        """Have all members leave; those that do not in time are killed. Safe to call twice."""
        if not self.is_ours:
            return
        for child in self._children.values():
            child.socket.close()
        deadline = time.monotonic() + wait_s
        for child in self._children.values():
            child.stop(deadline)
        self._children, self.frames = {}, {}
