"""Making a folder in the cache once. Knows nothing of what is made.

A result appears under its name whole or not at all: it is built in a folder beside it and renamed. A
file lock lets one process build while others wait; the kernel drops the lock when its holder dies, and
whoever takes it next clears what was left half done.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import UsageError

__all__ = ["build_once"]

_logger = logging.getLogger("shoal.checkpoint")


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return ``target``, building it first if it is not there.

    Args:
        target: the folder wanted; its parent is created.
        build: fills an empty folder on the same file system. What it raises is passed on, and the
            folder is removed.

    Raises:
        UsageError: the folder's parent cannot be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"shoal's cache folder {target.parent} cannot be written ({error}); set SHOAL_HOME"
        ) from error
    with _lock(target.parent / f".{target.name}.lock"):
        if target.is_dir():  # another process was faster
            return target
        prefix = f".{target.name}.partial-"
        for leftover in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            build(partial)
            partial.chmod(0o755)  # mkdtemp's folders are for their maker alone
            partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.info("another process is making %s: waiting for it", path.name[1:].removesuffix(".lock"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
