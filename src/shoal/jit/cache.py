"""Keeps compiled kernels on disk between runs, and between the ranks of one run. Knows no kernel.

numba notices an edit in the file that holds a kernel, not one in a file whose kernels it calls. So the folder
is named by a hash over every source that may hold kernels, the compilers' versions and the processor. numba
replaces each file atomically but writes index and data one after the other; two processes that save different
signatures of one kernel at once would pair the index of one with the code of the other, hence the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import llvmlite
import llvmlite.binding
import numba
from numba.core import caching

from shoal.home import home

__all__ = ["KernelCache", "cache_folder", "compiling", "sources_digest"]

_log = logging.getLogger("shoal.jit")

_PACKAGE = Path(__file__).parent.parent
_KEPT_UNUSED_S = 30 * 24 * 3600.0


class KernelCache(caching._Cache):  # type: ignore[misc]
    """One kernel's compiled signatures on disk, looked for at its first call, not when it is defined."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._folder: Path | None = None
        self._files: Any = None  # numba's cache of this function, once it is prepared and while it is in use
        self._is_prepared = False

    @property
    def cache_path(self) -> str | None:
        """The folder in use; None before the first call and where nothing can be written."""
        return None if self._files is None else str(self._files.cache_path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for the signature, or None."""
        files = self._prepared()
        if files is None:
            return None
        with self._locked(fcntl.LOCK_SH):
            return files.load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code. A disk that can no longer be written is said, and then left alone."""
        files = self._prepared()
        if files is None:
            return
        try:
            with self._locked(fcntl.LOCK_EX):
                files.save_overload(sig, data)
        except OSError as error:
            self._files = None
            _log.warning("compiled kernel %s is not kept (%s)", self._function.__qualname__, error)

    def enable(self) -> None:
        """Use the disk. (It is used from the start.)"""
        self._is_prepared = False

    def disable(self) -> None:
        """Keep out of the disk."""
        self._is_prepared, self._files = True, None

    def flush(self) -> None:
        """Forget what is on disk for this kernel."""
        files = self._prepared()
        if files is not None:
            files.flush()

    def _prepared(self) -> Any:
        if not self._is_prepared:
            self._is_prepared = True
            self._folder = cache_folder(home())
            self._files = None if self._folder is None else _function_cache(self._folder)(self._function)
        return self._files

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)  # another process may have cleaned up
        with (self._folder / ".lock").open("a") as file:
            fcntl.flock(file, how)
            yield


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile inside this what several processes need at about the same time: the first does, the others wait
    and read it from disk."""
    folder = cache_folder(home())
    if folder is None:
        yield
        return
    with (folder / ".compiling").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def cache_folder(root: Path) -> Path | None:
    """The folder for the present sources, compilers and processor, made if need be; None if it can't be.

    Args:
        root: shoal's cache folder. Folders of other sources that nobody has used for a month go.
    """
    folder = root / "kernels" / sources_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(folder)
    except OSError as error:
        _log.warning("kernels are compiled anew in each process: %s cannot be used (%s)", folder, error)
        return None
    _remove_unused(folder)
    return folder


@functools.cache
def sources_digest(package: Path = _PACKAGE) -> str:
    """Twenty hex digits that change with any source that may hold kernels, with the compilers and the CPU."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        text = path.read_bytes()
        if path.parent.name in ("jit", "cpu_kernels") or b"shoal.jit" in text:
            digest.update(f"{path.relative_to(package)}\0{len(text)}\0".encode())
            digest.update(text)
    binding = llvmlite.binding
    features = binding.get_host_cpu_features().flatten()
    for fact in (numba.__version__, llvmlite.__version__, binding.get_host_cpu_name(), features):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:20]


def _remove_unused(folder: Path) -> None:
    """Remove the neighbours of ``folder`` that were last used long ago."""
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):  # another process removes it at this moment
            if other != folder and time.time() - other.stat().st_mtime > _KEPT_UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)


@functools.cache
def _function_cache(folder: Path) -> type:
    """numba's cache, in ``folder`` and nowhere else. (A setting of numba's would move its user's own too.)"""

    class Locator(caching.UserProvidedCacheLocator):  # type: ignore[misc]
        def __init__(self, function: Any, file: str) -> None:
            self._py_file = file
            self._lineno = function.__code__.co_firstlineno
            self._cache_path = str(folder / self.get_suitable_cache_subpath(file))

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            return cls(function, file) if Path(file).exists() else None

    class Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes: ClassVar[list[type]] = [Locator, caching.IPythonCacheLocator]

    class FunctionCache(caching.FunctionCache):  # type: ignore[misc]
        _impl_class = Implementation

    return FunctionCache
