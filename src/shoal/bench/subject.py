"""The model that is measured: its folder, tokenizer and length, and the machine. Loads no weights."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shoal.bench.cost import Ceiling, cost_of
from shoal.bench.offline import Subject
from shoal.bench.roof import measure_roof
from shoal.checkpoint.source import resolve
from shoal.device.base import resolve_device
from shoal.device.cpu import usable_cores
from shoal.engine.text import Tokenizer
from shoal.model.build import load_config, model_length, steady_length

__all__ = ["load_ceiling", "load_subject", "machine"]

_UNKNOWN_LENGTH = 2048  # as the engine has it for a model that does not say


def load_subject(options: Mapping[str, Any]) -> tuple[Subject, Path]:
    """The model of some engine options, and its folder.

    Args:
        options: fields of EngineConfig; ``model`` at least.

    Raises:
        UsageError: no such model, or one that cannot be served.
    """
    trust = bool(options.get("trust_remote_code", False))
    path = resolve(options["model"], options.get("revision"), progress=False)
    text_config = load_config(path, trust).get_text_config()
    lengths = [model_length(text_config), steady_length(text_config), options.get("max_model_len")]
    known = [length for length in lengths if length is not None]
    tokenizer = Tokenizer.load(path, trust, vocab_size=text_config.vocab_size)
    return Subject(tokenizer, min(known, default=_UNKNOWN_LENGTH)), path


def load_ceiling(options: Mapping[str, Any], path: Path, threads: Iterable[int]) -> Ceiling | None:
    """What the machine could do for a model: measured, for each number of threads in all.

    Returns:
        None on other devices than CPUs, and where the model's shapes do not tell what it computes.

    Raises:
        UsageError: no such device, or a model that cannot be served.
    """
    if resolve_device(str(options.get("device", "auto"))).kind != "cpu":
        return None
    cost = cost_of(path, bool(options.get("trust_remote_code", False)))
    if cost is None:
        return None
    return Ceiling(cost, {number: measure_roof(number) for number in sorted(set(threads))})


def machine() -> dict[str, Any]:
    """What a result must name to mean anything."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("shoal", "torch", "transformers")},
    }
