"""Progress of a long step: a bar on a terminal, plain lines elsewhere, nothing when not wanted.

Everything goes to stderr, since stdout belongs to results. Knows nothing of what is in progress.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Report", "reporting", "say"]

Report = Callable[[float, float], None]
"""Called with how much is done and how much there is."""


def say(line: str, wanted: bool = True) -> None:
    """One plain line to stderr."""
    if wanted:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def reporting(title: str, wanted: bool) -> Iterator[Report]:
    """A function to report progress to, for as long as the context lasts.

    Args:
        title: what is in progress.
        wanted: False: reports go nowhere.
    """
    if not wanted:
        yield lambda done, total: None
    elif not sys.stderr.isatty():
        say(f"{title} ...")
        yield lambda done, total: None
    else:
        with _bar(title) as report:
            yield report


@contextmanager
def _bar(title: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
