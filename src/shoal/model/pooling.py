"""Whether a checkpoint is served as a generator or as an encoder, by which class, and what that class can
answer. Decided by the config and the folder; reads no weights, and knows no model by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from shoal.errors import UnsupportedError
from shoal.model.build import build_empty, causal_class, model_length
from shoal.model.classes import architecture_class

__all__ = [
    "MODULES_FILE",
    "end_token",
    "is_pooling",
    "longest_text",
    "makes_text",
    "served_class",
    "tasks_of",
]

MODULES_FILE = "modules.json"
"""What sentence-transformers writes beside a model: it is there for its vectors."""

_GENERATORS = frozenset(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
_ENCODERS = frozenset(auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.values())
_TASKS = {
    "classify": frozenset(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()),
    "token_classify": frozenset(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values()),
    "fill_mask": frozenset(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()),
}
_SUFFIXES = {  # of classes that come with a checkpoint
    "classify": "ForSequenceClassification",
    "token_classify": "ForTokenClassification",
    "fill_mask": "ForMaskedLM",
}


def is_pooling(config: Any, path: Path, runner: str = "auto") -> bool:
    """Whether the model is an encoder here: texts in, vectors or scores out, nothing generated.

    Args:
        config: transformers'.
        path: the checkpoint's folder.
        runner: ``generate`` and ``pooling`` decide; ``auto``: what the config's architecture is for.
    """
    if runner != "auto":
        return runner == "pooling"
    if (path / MODULES_FILE).is_file():
        return True
    named = _named(config)
    remote = getattr(config, "auto_map", None) or {}
    if named is None:
        return type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
    if named in _GENERATORS or str(remote.get("AutoModelForCausalLM", "")).endswith(f".{named}"):
        return False
    sorts = named in _TASKS["classify"] or named in _TASKS["token_classify"]
    return sorts or named in _ENCODERS or not config.is_encoder_decoder


def served_class(
    config: Any, path: Path, trust_remote_code: bool = False, runner: str = "auto"
) -> type[PreTrainedModel]:
    """The class that serves a checkpoint; of an encoder that has no head of use, the model below its head.

    Raises:
        UnsupportedError: there is none, or its code is not trusted.
    """
    if not is_pooling(config, path, runner):
        return causal_class(config, path, trust_remote_code)
    found = architecture_class(config, path, trust_remote_code)
    if tasks_of(found) or found.__name__ in _ENCODERS:
        return found
    if config.is_encoder_decoder:
        raise UnsupportedError(
            f"model: {found.__name__} is an encoder and a decoder; vectors are made by encoders or decoders "
            "alone so far",
            field="model",
        )
    entry = AutoModel._model_mapping.get(type(config), found)
    bare: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return bare


def makes_text(config: Any) -> bool:
    """Whether the config's architecture generates text, whatever it is used for here."""
    kind = type(config)
    is_decoder = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING
    return is_decoder or _named(config) in _GENERATORS


def longest_text(model_class: type[PreTrainedModel], config: Any) -> int | None:
    """Tokens that a model has positions for, or None where its config does not say.

    A table of positions that has a row for padding counts from behind that row.
    """
    length = model_length(config.get_text_config())
    if length is None:
        return None
    model = build_empty(model_class, config, torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.num_embeddings == length:
            return length if module.padding_idx is None else length - module.padding_idx - 1
    return length


def tasks_of(model_class: type[PreTrainedModel]) -> frozenset[str]:
    """Beside vectors: ``classify`` (texts), ``token_classify``, ``fill_mask``."""
    name = model_class.__name__
    return frozenset(
        task for task, names in _TASKS.items() if name in names or name.endswith(_SUFFIXES[task])
    )


def end_token(config: Any) -> int | None:
    """The token that a text's classes are read at, where a model looks for one: encoder-decoders do."""
    end = getattr(config, "eos_token_id", None)
    return end if getattr(config, "is_encoder_decoder", False) and isinstance(end, int) else None


def _named(config: Any) -> str | None:
    found = getattr(config, "architectures", None)
    return found[0] if isinstance(found, (list, tuple)) and found else None
