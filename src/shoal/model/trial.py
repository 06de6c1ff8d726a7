"""Something that may fail on any rank, tried by all of them together: all learn how it went, and none waits
for another that has given up. Knows no way of serving.

Before every collective of a trial, the ranks tell each other whether they go on, are done or have failed. So
it ends on all of them at once: as soon as one does not go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.comm.base import Comm
from shoal.shard.link import Link

__all__ = ["ODDITIES", "Trials"]

ODDITIES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, MemoryError)
"""What a model's own code makes of a call it was not written for; torch's want of memory is among them."""

_GOES_ON, _DONE, _FAILED = range(3)
_REASON_BYTES = 320  # of what a rank tells the others


class Trials:
    """One rank's part in what all ranks of a group try.

    Args:
        link: the end of the group that the model's modules hold; None: there is no other rank.
        device: where the ranks' words are exchanged.
    """

    def __init__(self, link: Link | None = None, device: torch.device | None = None) -> None:
        self._link = link
        self._device = device

    def problem(self, trial: Callable[[], str | None]) -> str | None:
        """Why not every rank can go on so, the same on all of them; or None.

        Args:
            trial: says what is wrong, or None; what a model's own code raises is a problem, too. The model's
                modules may meet other ranks in it; nothing else may.

        Raises:
            RankError: a rank did not come in time, or died.
        """
        if self._link is None or self._link.comm.size == 1:
            return _found(trial)
        own, has_passed = None, False
        words = _Words(self._link.comm, self._device)
        try:
            with self._link.lent(words):
                own = _found(trial)
            has_passed = words.end(_DONE if own is None else _FAILED)
        except _EndedError:
            pass  # another rank had no more to say; what it was is told below
        return None if has_passed else _reason(words.exchanged_text(own or ""))

    def agree(self, holds: bool, reason: str) -> str | None:
        """None if something holds on every rank; else the reason, with the rank."""
        return self.problem(lambda: None if holds else reason)


class _EndedError(Exception):
    """A trial has ended on another rank. No model's code catches it."""


class _Words:
    """A :class:`shoal.comm.base.Comm` whose every collective is preceded by the ranks' words."""

    def __init__(self, comm: Comm, device: torch.device | None) -> None:
        self._comm = comm
        self._device = device
        self.rank, self.size = comm.rank, comm.size

    def end(self, word: int) -> bool:
        """Say how it went; whether it went well on every rank."""
        return self._exchanged(word) == [_DONE] * self.size

    def exchanged_text(self, text: str) -> list[str]:
        """Every rank's text, cut to what is sent."""
        data = text.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)[None]
        everyone = self._comm.all_gather(mine, [1] * self.size, 0).cpu()
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in everyone]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._go_on()
        return self._comm.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        self._go_on()
        return self._comm.all_gather(tensor, sizes, dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self._go_on()
        return self._comm.broadcast(tensor, source)

    def barrier(self) -> None:
        self._go_on()

    def close(self) -> None:
        """The group is not this one's to close."""

    def _go_on(self) -> None:
        if self._exchanged(_GOES_ON) != [_GOES_ON] * self.size:
            raise _EndedError

    def _exchanged(self, word: int) -> list[int]:
        mine = torch.tensor([word], device=self._device)
        words: list[int] = self._comm.all_gather(mine, [1] * self.size, 0).tolist()
        return words


def _found(trial: Callable[[], str | None]) -> str | None:
    try:
        return trial()
    except ODDITIES as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def _reason(texts: Sequence[str]) -> str:
    """One for all ranks, of what each found; which rank it was, if not all."""
    failed = [rank for rank, text in enumerate(texts) if text]
    if not failed:
        return "its code meets the other ranks more often on some ranks than on others"
    first = failed[0]
    return texts[first] if len(failed) == len(texts) else f"on rank {first}: {texts[first]}"
