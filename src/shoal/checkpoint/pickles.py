"""torch's old pickles, which cannot be read in part: rewritten once as safetensors, in the cache.
Knows no model.

Such a file has to be loaded whole. Many ranks that did so would hold as many copies; so one process does it,
the others wait, and all read their parts of the result.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shoal.checkpoint.cache import build_once
from shoal.checkpoint.files import SAFETENSORS
from shoal.errors import CheckpointError
from shoal.home import home

__all__ = ["is_old_pickle", "load_pickle", "rewritten"]

_logger = logging.getLogger("shoal.checkpoint")

_ZIP_MAGIC = b"PK\x03\x04"  # torch's format since 1.6


def is_old_pickle(path: Path) -> bool:
    """Whether a pickle is in the format torch wrote before 1.6, which is no archive that can be mapped."""
    with path.open("rb") as file:
        return file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC


def rewritten(path: Path) -> Path:
    """The safetensors file with an old pickle's tensors, made on the first call.

    Raises:
        CheckpointError: damaged, or no file of tensors.
    """
    facts = path.stat()
    identity = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    key = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    def build(folder: Path) -> None:
        _logger.info("%s is in torch's old format: it is rewritten once, as a whole, in %s", path, home())
        save_file(_apart(load_pickle(path, mapped=False)), folder / SAFETENSORS)

    return build_once(home() / "pickles" / key, build) / SAFETENSORS


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, each in memory of its own, as safetensors wants them."""
    seen: set[int] = set()
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_alone = storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
        own[name] = tensor if is_alone and storage.data_ptr() not in seen else tensor.contiguous().clone()
        seen.add(storage.data_ptr())
    return own


def load_pickle(path: Path, mapped: bool) -> dict[str, torch.Tensor]:
    """The tensors of a pickle by name, loaded without running code in it.

    Args:
        path: the file.
        mapped: map it instead of reading it; only newer ones can be.

    Raises:
        CheckpointError: damaged, or no file of tensors.
    """
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: damaged, or not a file of tensors ({error})") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: holds a {type(loaded).__name__}, not named tensors")
    return {name: value for name, value in loaded.items() if torch.is_tensor(value)}
