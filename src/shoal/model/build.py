"""Builds transformers' own module without weights: big tensors on meta, rotary tables and the like real.
Knows no plan and no checkpoint; whoever calls it shards and loads.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from shoal.errors import ModelNotFoundError, UnsupportedError
from shoal.model.classes import architecture_class, class_from_code, reading_code
from shoal.plan.skeleton import BigOnMeta, building

__all__ = [
    "build_empty",
    "causal_class",
    "load_config",
    "model_length",
    "steady_length",
    "vocabulary_size",
    "windows",
]

_WINDOWS = ("sliding_window", "local_attention", "local_attn_chunk_length", "lsh_attn_chunk_length")


def load_config(path: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a local model folder.

    Raises:
        ModelNotFoundError: config.json cannot be understood.
    """
    try:
        with reading_code():
            return AutoConfig.from_pretrained(
                path, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:  # config classes validate themselves, each raising what it likes
        raise ModelNotFoundError(
            f"model: {path}/config.json cannot be read: {error}", field="model"
        ) from error


def causal_class(
    config: PreTrainedConfig, path: Path | None = None, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """The class that serves ``config`` as a decoder with a language-model head, on its own or on an encoder.

    Raises:
        UnsupportedError: there is none.
    """
    remote = getattr(config, "auto_map", {}).get("AutoModelForCausalLM") if trust_remote_code else None
    if remote and path is not None:
        return class_from_code(remote, path)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        named = architecture_class(config, path, trust_remote_code)
        if named.can_generate():
            return named
        raise UnsupportedError(
            f"model: {config.model_type} has no decoder that generates text in transformers "
            f"({auto.__name__} does not know it)",
            field="model",
        )
    found: type[PreTrainedModel] = auto._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def build_empty(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attention: str | None = "eager",
) -> PreTrainedModel:
    """A model without weights, in eval mode, without gradients: the bigger ones are on meta, the smaller
    ones hold nothing yet. Rotary tables and the like have their values. No random number is drawn.

    Args:
        model_class: a transformers model class.
        config: not changed; the model keeps a copy.
        dtype: of its floating-point parameters.
        attention: transformers' name of its attention; None: what transformers chooses for the class.
    """
    config = copy.deepcopy(config)
    config.dtype = dtype
    asked = {} if attention is None else {"attn_implementation": attention}
    with building(), BigOnMeta():
        model = model_class._from_config(config, dtype=dtype, **asked)
    return model.eval().requires_grad_(False)


def steady_length(config: PreTrainedConfig) -> int | None:
    """Positions up to which a token's rotary embedding depends on its own position alone; None: always.

    With ``longrope``, transformers takes other frequencies for the whole call as soon as any position in it
    reaches ``original_max_position_embeddings`` (modeling_rope_utils): in a batch, one request's length
    would change another's numbers.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = []
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, dict) and "longrope" in (entry.get("rope_type"), entry.get("type")):
            own = entry.get("original_max_position_embeddings")
            limits.append(own or getattr(config, "original_max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=None)


def vocabulary_size(config: PreTrainedConfig) -> int:
    """Number of token embeddings; of a model that reads characters and says none, all of Unicode."""
    return int(getattr(config.get_text_config(), "vocab_size", sys.maxunicode + 1))


def windows(config: PreTrainedConfig) -> list[int]:
    """How many positions layers see, of those that do not see all, or how long the chunks are that they cut a
    sequence into. Layers may each have a config of their own."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    found = {getattr(layer, name, None) for layer in layers for name in _WINDOWS}
    return sorted(window for window in found if isinstance(window, int) and window > 0)


def model_length(config: PreTrainedConfig) -> int | None:
    """Positions the model was made for, or None where its config does not say."""
    for name in (
        "max_position_embeddings",
        "max_decoder_position_embeddings",
        "n_positions",
        "seq_length",
        "max_seq_len",
        "n_ctx",
    ):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
