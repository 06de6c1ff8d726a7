"""Fetching a model from the Hugging Face hub: only the files that loading needs. Knows no format.

Every failure becomes one error that says what to try instead; a hub that does not answer costs seconds.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import SAFETENSORS, SAFETENSORS_INDEX
from shoal.checkpoint.progress import say
from shoal.checkpoint.support import check_folder
from shoal.errors import ModelNotFoundError, UsageError

__all__ = ["fetch_config", "fetch_from_hub", "wanted_files"]

_TIMEOUT_S = 5.0

# Config, tokenizer and templates. Python files hold the model's own code, which runs only on request.
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")


def wanted_files(files: list[str]) -> tuple[list[str], list[str]]:
    """Of a repository's files, the small ones and the weights; safetensors rather than pickles."""
    top = [name for name in files if "/" not in name]
    small = [name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in _SMALL)]
    small += [name for name in files if fnmatch.fnmatch(name, "*_Pooling/config.json")]
    if SAFETENSORS in top:
        return small, [SAFETENSORS]
    pattern = "model-*.safetensors" if SAFETENSORS_INDEX in top else "pytorch_model*.bin"
    return small, [name for name in top if fnmatch.fnmatch(name, pattern)]


def fetch_from_hub(name: str, revision: str | None, progress: bool) -> Path:
    """The folder of a hub model in the hub's own cache, downloaded as far as it is not there.

    Raises:
        ModelNotFoundError: no such model or revision, no access, or no connection and nothing cached.
        UnsupportedError: a model of a kind that is not built yet; found before its weights are fetched.
    """
    return _fetched(name, revision, progress, with_weights=True)


def fetch_config(name: str, revision: str | None, progress: bool) -> Path:
    """The same without the weights: what describes the model.

    Raises:
        ModelNotFoundError, UnsupportedError: as :func:`fetch_from_hub`.
    """
    return _fetched(name, revision, progress, with_weights=False)


def _fetched(name: str, revision: str | None, progress: bool, with_weights: bool) -> Path:
    try:
        with _progress_bars(progress):
            return _fetch(name, revision, progress, with_weights)
    except UsageError:
        raise
    except Exception as error:  # the hub's client raises its own errors, its transport's and the system's
        raise ModelNotFoundError(
            f"model: {name!r} is no folder here and could not be had from the Hugging Face hub "
            f'({_short(error)}); try "demo", a folder, or another hub id',
            field="model",
        ) from error


def _fetch(name: str, revision: str | None, progress: bool, with_weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    try:
        files = HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S).siblings or []
    except Exception as error:  # offline, or refused: what an earlier download left is as good
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        except Exception:  # nothing was left: the first error is the one to tell
            raise error from None
    small, weights = wanted_files([file.rfilename for file in files])
    folder = Path(_download(snapshot_download, name, revision, small))
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        check_folder(folder)
    if weights and with_weights:
        say(f"Fetching {name} from the Hugging Face hub ...", progress)
        folder = Path(_download(snapshot_download, name, revision, small + weights))
    return folder


def _download(snapshot_download: Any, name: str, revision: str | None, files: list[str]) -> str:
    folder: str = snapshot_download(name, revision=revision, allow_patterns=files, etag_timeout=_TIMEOUT_S)
    return folder


@contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    """Let the hub's client draw its bars only where they are wanted and seen."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if (wanted and sys.stderr.isatty()) or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _short(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
