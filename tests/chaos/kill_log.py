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
    "lost": re.compile(
        r"starting the ranks anew, (\d+) sequences .*in flight: (\d+) in their prompt, (\d+) beyond"
    ),
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
    num_replayed: int = 0  # sequences that ran at a loss
    num_in_prompt: int = 0  # of these, in flight without a token yet
    num_beyond: int = 0  # and with some


class EventLog:
    """The events of one log, as far as it is written. Each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0  # bytes, of whole lines
        self._events: list[Event] = []
        self._problems: list[str] = []

    def events(self, kind: str | None = None, after: float = 0.0) -> list[Event]:
        """Those of one kind, or all, since a moment."""
        self._read()
        return [event for event in self._events if kind in (None, event.kind) and event.at >= after]

    def first(self, kind: str, after: float = 0.0) -> Event | None:
        """The first of its kind since a moment."""
        return next(iter(self.events(kind, after)), None)

    def problems(self) -> list[str]:
        """Errors that are told, of whatever logger; what a rank says of its own failure is none."""
        self._read()
        return list(self._problems)

    def _read(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        self._num_read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if fault := _FAULT.match(line):
                self._events.append(Event(float(fault[1]), "fault", line))
            elif line.startswith("{") and line.endswith("}"):
                entry = json.loads(line)
                at = datetime.fromisoformat(entry["time"]).timestamp()
                self._events += _event(at, entry["message"])
                if entry["level"] == "error" and not re.match(r"rank \d+ failed", entry["message"]):
                    self._problems.append(entry["message"].splitlines()[0])


def _event(at: float, words: str) -> Iterator[Event]:
    for kind, form in _KINDS.items():
        if match := form.search(words):
            if kind == "spawned":
                yield Event(at, kind, words, pids=tuple(map(int, match[1].split(", "))))
            elif kind == "lost":
                num_replayed, num_in_prompt, num_beyond = map(int, match.groups())
                yield Event(at, kind, words, (), num_replayed, num_in_prompt, num_beyond)
            else:
                yield Event(at, kind, words)
