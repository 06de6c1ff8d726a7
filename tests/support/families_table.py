"""Writes docs/families.md: how every family of the zoo is split, and that it is served.

Run from the project's root, on an idle machine::

    PYTHONPATH=tests python -m support.families_table --output docs/families.md

What was measured is kept in a folder, by the digest of all code that it depends on: a run that was stopped
goes on where it ended. What was not right is measured again. Knows no family.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import logging
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
import transformers

import shoal
from support.families_page import SERVED_RANKS, Row, page
from support.rank_pool import RankPool
from support.zoo.catalogue import CLASSIFIERS, LISTED, UNLISTED, family_of
from support.zoo.family import Family
from support.zoo.split import Split, measure_split
from support.zoo.trial import Service, measure_service

SECTIONS = (
    ("The listed families, split over 2, 3 and 4 ranks", LISTED, (2, 3, 4)),
    ("Families nobody listed, split over 2 ranks", UNLISTED, (2,)),
    ("Families with a head that sorts texts", CLASSIFIERS, ()),  # split as without it
)
_ROOT = Path(__file__).parent
_TASKS_A_PROCESS = 60
"""About; then processes are started anew: engines of many models leave something behind. (The pool's own
``max_tasks_per_child`` starts none for tasks that were submitted before: CPython issue 115634.)"""


def measure(part: str, name: str, ranks: Sequence[int]) -> Split | Service:
    """A part of one row, in a worker process."""
    family = family_of(name)
    return measure_split(family, _pool(), ranks) if part == "split" else measure_service(family, SERVED_RANKS)


@functools.cache
def _pool() -> RankPool:
    """This process's ranks."""
    return RankPool()


def _quieten() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class Kept:
    """Measured parts in a folder.

    Args:
        digest: of what they depend on; None: whatever they were measured with is good.
    """

    def __init__(self, folder: Path, digest: str | None) -> None:
        self._folder, self._digest = folder, digest
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, part: str, name: str) -> Split | Service | None:
        """A part, if it is there."""
        path = self._path(part, name)
        entry = json.loads(path.read_text()) if path.is_file() else None
        if entry is None or self._digest not in (None, entry["digest"]):
            return None
        return Split(**entry["measured"]) if part == "split" else Service.from_dict(entry["measured"])

    def put(self, part: str, name: str, measured: Split | Service) -> None:
        """Keep a part."""
        entry = {"digest": self._digest or sources_digest(), "measured": dataclasses.asdict(measured)}
        self._path(part, name).write_text(json.dumps(entry, indent=1))

    def _path(self, part: str, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '_')}.{part}.json"


@functools.cache
def sources_digest() -> str:
    """Of the package, the zoo and the versions below them."""
    found = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for folder in (Path(shoal.__file__).parent, _ROOT):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def measure_all(
    kept: Kept, sections: Mapping[str, Sequence[tuple[Family, Sequence[int]]]], jobs: int
) -> None:
    """Measure what is not kept, or was kept and is not right, several at once."""
    tasks = [
        (part, family.name, ranks)
        for rows in sections.values()
        for family, ranks in rows
        for part in (("split", "service") if ranks else ("service",))
        if (found := kept.get(part, family.name)) is None or not found.is_right
    ]
    number = 0
    for first in range(0, len(tasks), jobs * _TASKS_A_PROCESS):
        workers = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _quieten)
        some = tasks[first : first + jobs * _TASKS_A_PROCESS]
        running = {workers.submit(measure, *task): task for task in some}
        try:
            for future in as_completed(running):
                part, name, _ = running[future]
                found = future.result()
                kept.put(part, name, found)
                number += 1
                print(f"{number}/{len(tasks)} {name}: {_said(found)}", file=sys.stderr, flush=True)
        finally:
            workers.shutdown(cancel_futures=True)


def _said(measured: Split | Service) -> str:
    if isinstance(measured, Split):
        return measured.failure or f"split, {max(measured.errors.values()):.0e}"
    trials = [*measured.generated.values(), *measured.encoded.values()]
    return "; ".join(f"{trial.way} {trial.verdict} {trial.problem}".strip() for trial in trials)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output", type=Path, help="the page; by default it is printed")
    parser.add_argument("--rows", type=Path, default=Path("build/families"), help="where rows are kept")
    parser.add_argument("--keep-all", action="store_true", help="also what was measured with other code")
    parser.add_argument("--jobs", type=int, default=2, help="processes, beside the ranks'")
    options = parser.parse_args(arguments)
    _quieten()
    sections = {
        title: [(f, ranks) for f in families.values() if f.is_known and f.name in (options.names or families)]
        for title, families, ranks in SECTIONS
    }
    kept = Kept(options.rows, None if options.keep_all else sources_digest())
    measure_all(kept, sections, options.jobs)
    text = "\n".join(
        page({title: [_row(kept, f) for f, _ in rows] for title, rows in sections.items() if rows})
    )
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)


def _row(kept: Kept, family: Family) -> Row:
    split, service = kept.get("split", family.name), kept.get("service", family.name)
    assert isinstance(service, Service), family.name
    return Row(family, service, split if isinstance(split, Split) else None)


if __name__ == "__main__":
    main(sys.argv[1:])
