"""What a model's files say about generation: end-of-sequence ids and sampling defaults. Knows no
request and no tokenizer's text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError, RequestError
from shoal.sampling_params import SamplingParams

__all__ = ["eos_token_ids", "model_sampling_defaults", "read_generation_config"]

_FILE = "generation_config.json"
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "length_penalty",
    "early_stopping",
)


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The folder's ``generation_config.json``; empty if there is none.

    Raises:
        CheckpointError: the file is there and is not a JSON object.
    """
    path = Path(folder) / _FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; mend it or remove it") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def model_sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """The sampling values a model's authors chose, for ``SamplingParams.with_defaults``.

    Returns:
        those of temperature, top_p, top_k, min_p, repetition_penalty, no_repeat_ngram_size, of beams
        length_penalty and early_stopping, and do_sample that ``generation_config.json`` sets; empty
        without the file.

    Raises:
        CheckpointError: the file is malformed, or a value is out of its range.
    """
    config = read_generation_config(folder)
    path = Path(folder) / _FILE
    defaults = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
    top_k = defaults.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():
        defaults["top_k"] = int(top_k)
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}; mend it or remove it", error.field) from error
    do_sample = config.get("do_sample")
    if do_sample is not None:
        if not isinstance(do_sample, bool):
            raise CheckpointError(f"{path}: do_sample: must be true or false, got {do_sample!r}", "do_sample")
        defaults["do_sample"] = do_sample
    return defaults


def eos_token_ids(folder: str | Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids, by the first that names any: generation config, model config, tokenizer.

    Args:
        folder: where ``generation_config.json`` may lie.
        config: a mapping or a transformers config, or None; like the file's, its ``eos_token_id`` is
            an integer or a list of integers.
        tokenizer: anything with ``eos_token_id``, or None.

    Returns:
        ids in the order given, each once; empty if nothing ends a sequence.

    Raises:
        CheckpointError: an ``eos_token_id`` that is no token id, or a malformed file.
    """
    for source in (read_generation_config(folder), config, tokenizer):
        if isinstance(source, Mapping):
            value = source.get("eos_token_id")
        else:
            value = getattr(source, "eos_token_id", None)
        if value is None:
            continue
        ids = list(value) if isinstance(value, (list, tuple)) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise CheckpointError(
                    f"eos_token_id must be an integer or a list of integers, got {value!r}", "eos_token_id"
                )
        known = [token for token in ids if token >= 0]  # some configs write -1 for none
        if known:
            return tuple(dict.fromkeys(known))
    return ()
