"""What an encoder-decoder's files say about its decoder's sequence: how it begins, which tokens are forced,
how long it and the encoder's input may be. Knows no request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.engine.generation_defaults import read_generation_config
from shoal.errors import CheckpointError

__all__ = ["Decoding", "read_decoding"]

_log = logging.getLogger("shoal.engine")

# With the values that change nothing. Beams are for requests to ask for: num_beams.
_IGNORED = {"num_beams": 1, "encoder_no_repeat_ngram_size": 0, "min_length": 0}


@dataclass(frozen=True, slots=True)
class Decoding:
    """How decoders of one model begin and end. A forced id of -1 forces nothing."""

    start_id: int  # the first of a decoder's ids, where the caller gives none
    forced_first_id: int = -1  # of its output, where the caller gives no ids: often a language
    forced_last_id: int = -1  # of its output, at max_tokens
    max_encoder_len: int = 0  # tokens of an encoder's input
    barred_ids: tuple[int, ...] = ()  # never part of an output


def read_decoding(
    folder: str | Path, config: Any, max_model_len: int, asked_len: int | None = None
) -> Decoding:
    """The decoding of a model folder, from its generation config, else from its config.

    Args:
        folder: where ``generation_config.json`` may lie.
        config: transformers'.
        max_model_len: tokens of a decoder's sequence, and of its encoder's input unless the config says how
            many that was made for.
        asked_len: what the user bounds both by; None: nothing.

    Raises:
        CheckpointError: nothing says how a decoder begins.
    """
    generation = read_generation_config(folder)
    start = _token(generation, config, "decoder_start_token_id")
    if start < 0:
        start = _token(generation, config, "bos_token_id")
    if start < 0:
        raise CheckpointError(
            f"{folder}: neither generation_config.json nor config.json has a decoder_start_token_id: "
            "how does a decoder begin?",
            "decoder_start_token_id",
        )
    most = getattr(config, "max_encoder_position_embeddings", None)
    return Decoding(
        start,
        _token(generation, config, "forced_bos_token_id"),
        _token(generation, config, "forced_eos_token_id"),
        min(most if isinstance(most, int) else max_model_len, asked_len or 1 << 30),
        _barred(generation, config),
    )


def _barred(generation: Mapping[str, Any], config: Any) -> tuple[int, ...]:
    """Tokens that are bad words by themselves. What else changes outputs and is not ours is said."""
    words = _value(generation, config, "bad_words_ids") or []
    ignored = [
        f"{name} {value}"
        for name, neutral in _IGNORED.items()
        if (value := _value(generation, config, name)) not in (None, neutral)
    ]
    if any(len(word) > 1 for word in words):
        ignored.append("bad_words_ids of several tokens")
    if ignored:
        _log.warning("what the model's files ask for is not done: %s", ", ".join(ignored))
    return tuple(word[0] for word in words if len(word) == 1)


def _value(generation: Mapping[str, Any], config: Any, name: str) -> Any:
    return generation.get(name) if generation else getattr(config, name, None)


def _token(generation: Mapping[str, Any], config: Any, name: str) -> int:
    """A token id, the first where there are several; -1 where there is none. A generation config that says
    anything at all about how decoders begin says everything.
    """
    value = generation.get(name)
    if value is None and not (generation and name.startswith("forced")):
        value = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
