"""Proved plans on disk: one small JSON file each, named by everything the proof depends on.
Knows no model code.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from shoal.errors import PlanError
from shoal.plan.types import Plan

__all__ = ["has_source", "load_plan", "plan_key", "store_plan"]

# What a config says besides the structure of the model.
_NOT_STRUCTURE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
_CUSTOM_CODE = "transformers_modules"  # the package in which transformers puts it
_log = logging.getLogger("shoal.prove")


def plan_key(model_class: type[nn.Module], config: Any, tp: int, policy: str = "") -> str:
    """A hex digest of the class, its source, the structural config, the rank count, the user's policy and
    all versions.
    """
    parts = [
        f"{model_class.__module__}.{model_class.__qualname__}",
        _source_digest(model_class),
        json.dumps(_plain(_structure(config))),
        str(tp),
        policy,
        _version("transformers"),
        _version("torch"),
        _version("shoal"),
        _planner_digest(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def has_source(model_class: type[nn.Module]) -> bool:
    """Whether all the code of a class lies in files, which tell it from another class of its name: only then
    can a plan be kept for another process.
    """
    for base in model_class.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        try:
            if not Path(inspect.getfile(base)).is_file():
                return False
        except (OSError, TypeError):
            return False
    return True


def load_plan(folder: Path, key: str) -> Plan | None:
    """The cached plan, or None if there is none; a damaged file is passed over, and a log line says so."""
    path = folder / f"{key}.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("plan cache: %s cannot be read (%s); the plan is derived anew", path, error)
        return None
    try:
        return Plan.from_dict(json.loads(text))
    except (json.JSONDecodeError, PlanError) as error:
        _log.warning("plan cache: %s is damaged (%s); the plan is derived anew", path, error)
        return None


def store_plan(folder: Path, key: str, plan: Plan) -> None:
    """Write the plan so that a reader sees all of it or nothing; a full disk costs only the cache."""
    temporary: str | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{key}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(plan.to_dict(), file)
        Path(temporary).replace(folder / f"{key}.json")
    except OSError as error:
        _log.warning("plan cache: %s cannot be written (%s)", folder, error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def _structure(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _NOT_STRUCTURE}


def _plain(value: Any) -> Any:
    """Lists, strings and numbers only, the same for equal values in every process."""
    if isinstance(value, dict):
        return sorted([str(key), _plain(inner)] for key, inner in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(inner)) for inner in value)
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _source_digest(model_class: type[nn.Module]) -> str:
    """Of the files that define the class and what it inherits from, torch's own left out; of a checkpoint's
    own code all that came with it.
    """
    digest = hashlib.sha256()
    for base in model_class.__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("torch", "builtins"):
            continue
        try:
            own = Path(inspect.getfile(base))
            for path in sorted(own.parent.glob("*.py")) if package == _CUSTOM_CODE else [own]:
                digest.update(path.read_bytes())
        except (OSError, TypeError):
            # Defined in a notebook, say: its text is not on disk, so its identity in memory must do.
            digest.update(repr((base, id(base))).encode())
    return digest.hexdigest()


def _planner_digest() -> str:
    """Of the planner's own files: a plan made by another planner is not this one's."""
    digest = hashlib.sha256()
    for path in _planner_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _planner_files() -> Iterator[Path]:
    root = Path(__file__).parent.parent
    for room in ("plan", "prove", "shard"):
        yield from sorted((root / room).glob("*.py"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
