"""From what a user calls a model to a local folder with config, weights and tokenizer. Loads no weights.

``demo`` is the demo model; a folder is itself; a ``.gguf`` file is dequantised once into the cache;
anything else is a name on the Hugging Face hub, whose own cache then holds it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from shoal.checkpoint.cache import build_once
from shoal.checkpoint.demo import fetch_demo
from shoal.checkpoint.files import find_weights
from shoal.checkpoint.gguf import convert, open_gguf
from shoal.checkpoint.hub import fetch_config, fetch_from_hub
from shoal.checkpoint.progress import reporting, say
from shoal.checkpoint.support import check_folder, check_supported
from shoal.errors import ModelNotFoundError, UsageError
from shoal.home import home

__all__ = ["check_supported", "resolve", "resolve_config"]

# What the hub allows: letters, digits, "-", "_" and ".", in one or two parts.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

_GGUF_MAGIC = b"GGUF"

# The number goes up when the conversion changes, so that an older result is not taken for a new one.
_GGUF_VERSION = 1


def resolve(name: str | Path, revision: str | None = None, progress: bool = True) -> Path:
    """The local folder of a model, fetched or converted first where needed.

    Args:
        name: ``demo``, a folder, a ``.gguf`` file or a hub id.
        revision: branch, tag or commit of a hub model.
        progress: show long steps on stderr.

    Raises:
        ModelNotFoundError: no such model, the hub cannot be reached, or a folder lacks config or weights.
        CheckpointError: a damaged file.
        UnsupportedError: a model of a kind that is not built yet.
    """
    if str(name) == "demo":
        return fetch_demo(progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.is_file():
        return _from_gguf(path, progress)
    if not _HUB_ID.fullmatch(str(name)) or path.suffix.lower() == ".gguf":
        raise ModelNotFoundError(
            f"model: there is no folder or .gguf file {str(name)!r}; {_WHAT_TO_TRY}", field="model"
        )
    return _checked(fetch_from_hub(str(name), revision, progress))


def resolve_config(name: str | Path, revision: str | None = None, progress: bool = False) -> Path:
    """The local folder of a model of which only the config is wanted: weights need not be there, and those
    on the hub are not fetched.

    Args:
        name: as :func:`resolve` takes it, or the path of a ``config.json``.
        revision: branch, tag or commit of a hub model.
        progress: show long steps on stderr.

    Raises:
        ModelNotFoundError: no such model, or a folder without config.
        CheckpointError: a damaged file.
        UnsupportedError: a model of a kind that is not built yet.
    """
    path = Path(name).expanduser()
    folder = path.parent if path.name == "config.json" and path.is_file() else path
    if str(name) != "demo" and folder.is_dir():
        return _with_config(folder)
    if str(name) == "demo" or path.is_file() or path.suffix.lower() == ".gguf":
        return resolve(name, revision, progress)
    if not _HUB_ID.fullmatch(str(name)):
        raise ModelNotFoundError(f"model: there is no folder {str(name)!r}; {_WHAT_TO_TRY}", field="model")
    return _with_config(fetch_config(str(name), revision, progress))


_WHAT_TO_TRY = (
    'pass "demo", a folder with config.json and weights, a .gguf file, or a hub id such as org/name'
)


def _with_config(folder: Path) -> Path:
    """The folder, if it has a config and nothing that is not built."""
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        check_folder(folder)
    else:
        raise ModelNotFoundError(f"model: {folder} has no config.json; {_WHAT_TO_TRY}", field="model")
    return folder


def _checked(folder: Path) -> Path:
    """The folder, if it has what loading needs and nothing that is not built."""
    _with_config(folder)
    if find_weights(folder) is None:
        raise ModelNotFoundError(
            f"model: {folder} has no weights (model.safetensors, its shards, or pytorch_model.bin)",
            field="model",
        )
    return folder


def _from_gguf(path: Path, progress: bool) -> Path:
    """The cached folder of a GGUF file, made on the first call."""
    with path.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise ModelNotFoundError(
                f"model: {path} is a file, but not a GGUF file; {_WHAT_TO_TRY}", field="model"
            )

    def build(folder: Path) -> None:
        gguf = open_gguf(path)
        needed = gguf.dequantised_bytes
        say(
            f"{path.name} takes {needed / 1e9:.2f} GB dequantised to float32, in memory and in {home()}",
            progress,
        )
        _check_space(needed, folder)
        with reporting(f"Dequantising {path.name}", progress) as report:
            convert(gguf, folder, report)

    return build_once(home() / "gguf" / _gguf_key(path), build)


def _gguf_key(path: Path) -> str:
    """A folder name for a file's identity: where it is, its size, and when it was last written."""
    facts = path.stat()
    identity = f"{_GGUF_VERSION} {path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _check_space(needed: int, folder: Path) -> None:
    free = _free_bytes(folder)
    if needed > free:
        raise UsageError(
            f"model: {needed / 1e9:.2f} GB are needed in {home()}, and {free / 1e9:.2f} GB are free there; "
            "set SHOAL_HOME to a larger disk",
            field="model",
        )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
