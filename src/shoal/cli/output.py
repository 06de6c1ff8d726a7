"""What commands print: JSON, JSONL, text; files that appear whole or not at all. Knows no engine."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import UsageError

__all__ = [
    "check_writable",
    "human_bytes",
    "print_json",
    "print_lines",
    "print_table",
    "to_jsonl",
    "write_whole",
]

_WIDEST = 500  # columns of a table that no terminal bounds


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print_lines([json.dumps(document, ensure_ascii=False, indent=2)])


def print_lines(lines: Iterable[str]) -> None:
    """Lines on stdout, as UTF-8 whatever the locale."""
    sys.stdout.flush()
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout, for people: as wide as a terminal, or as it needs to be in a file."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDEST)
    console.print(table)


def to_jsonl(rows: Iterable[Any]) -> list[str]:
    """One line of JSON per row."""
    return [json.dumps(row, ensure_ascii=False) for row in rows]


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written later, before anything costly is done.

    Raises:
        UsageError: its folder is missing or read-only, or it is a folder itself.
    """
    if path.is_dir():
        raise UsageError(f"--output {path}: is a folder")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--output {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--output {path}: not allowed to write to {folder}")


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write lines to ``path``; whoever reads it meanwhile sees the old file or the whole new one."""
    path = path.absolute()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    partial = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{line}\n" for line in lines)
        partial.chmod(0o666 & ~_umask())  # mkstemp's files are for their maker alone
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)  # can only be read by setting it
    os.umask(mask)
    return mask


def human_bytes(count: int) -> str:
    """``12.3 MB``; a MB is 10^6 bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
