"""What a server's log (``--log-format json``) says of lost ranks and of starts, with the moments. Knows the
words of the logger ``shoal.events`` and of ``SHOAL_FAULT``; nothing of what did the damage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

__all__ = ["Event", "EventLog"]

_KINDS = {
    "spawned": re.compile(r"^starting ranks of generation \d+: processes (.*)"),
    "lost": re.compile(r"starting the ranks anew.*in flight: (\d+) in their prompt, (\d+) beyond"),
    "failed": re.compile(r"^restart failed"),
    "served": re.compile(r"ranks serve again"),
    "ready": re.compile(r" ready in [\d.]+ s"),
}
_FAULT = re.compile(r"^SHOAL_FAULT: (?:raise|hang|memory|exit) at ([\d.]+)$")


@dataclass(frozen=True, slots=True)
class Event:
    """Its kind is ``spawned``: ranks are being started; ``ready``: the first ones serve; ``lost``: a loss is
    noticed; ``failed``: a start of new ranks came to nothing; ``served``: new ranks serve; or ``fault``: a
    rank fails as it was told to.
    """

    at: float  # seconds of the system's clock
    kind: str
    words: str
    pids: tuple[int, ...] = ()  # of the ranks that are being started
    num_in_prompt: int = 0  # sequences in flight that had no token yet, at a loss
    num_beyond: int = 0  # and those that had


class EventLog:
    """The events of one log, as far as it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def events(self, kind: str | None = None, after: float = 0.0) -> list[Event]:
        """Those of one kind, or all, since a moment."""
        return [event for event in self._read() if kind in (None, event.kind) and event.at >= after]

    def first(self, kind: str, after: float = 0.0) -> Event | None:
        """The first of its kind since a moment."""
        return next(iter(self.events(kind, after)), None)

    def problems(self) -> list[str]:
        """Errors that are told, of whatever logger; what a rank says of its own failure is none."""
        entries = (json.loads(line) for line in self._lines() if _is_entry(line))
        return [
            entry["message"].splitlines()[0]
            for entry in entries
            if entry["level"] == "error" and not re.match(r"rank \d+ failed", entry["message"])
        ]

    def _lines(self) -> list[str]:
        return self._path.read_text(errors="replace").splitlines()

    def _read(self) -> Iterator[Event]:
        for line in self._lines():
            if fault := _FAULT.match(line):
                yield Event(float(fault[1]), "fault", line)
            elif _is_entry(line):
                entry = json.loads(line)
                yield from _event(datetime.fromisoformat(entry["time"]).timestamp(), entry["message"])


def _event(at: float, words: str) -> Iterator[Event]:
    for kind, form in _KINDS.items():
        if match := form.search(words):
            if kind == "spawned":
                yield Event(at, kind, words, pids=tuple(map(int, match[1].split(", "))))
            elif kind == "lost":
                yield Event(at, kind, words, num_in_prompt=int(match[1]), num_beyond=int(match[2]))
            else:
                yield Event(at, kind, words)


def _is_entry(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")  # the last line may be half written
