"""Models understood but not built: refused by name, before anything is loaded. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError, UnsupportedError

__all__ = ["check_folder", "check_supported"]

# Keys of a config that hold another modality's settings, by what they are.
_MODALITIES = {
    "images": (
        "vision_config", "visual", "vit_config", "vision_tower", "mm_vision_tower", "img_processor",
        "vq_config",
    ),
    "audio": (
        "audio_config", "speech_config", "audio_processor", "codec_config", "num_mel_bins",
        "feat_extract_norm", "audio_channels", "audio_token_index", "acoustic_tokenizer_encoder_config",
    ),
    "video": ("video_config",),
}  # fmt: skip

_BACKBONE = "backbone_hidden_size"  # a config's key: the width of hidden states that another model must bring

# Parts of the names of classes that take or make something else than text.
_CLASSES = {
    "images": (
        "ForImage", "ForObjectDetection", "ForSemanticSegmentation", "ForDepthEstimation", "VisionModel",
        "VisionEncoderDecoder",
    ),
    "audio": ("ForAudio", "ForSpeech", "ForCTC", "AudioModel", "SpeechEncoderDecoder"),
    "video": ("ForVideo",),
}  # fmt: skip


def check_supported(config: Any) -> None:
    """Refuse a model of which something is not built.

    Args:
        config: a transformers config, or ``config.json`` as a mapping.

    Raises:
        UnsupportedError: quantised weights, inputs that are not text, or another model's hidden states (of
            which draft models go on); the message names what.
    """
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    for part in _parts(values):
        quantised = part.get("quantization_config") or part.get("compression_config")
        if quantised:
            raise _refusal(
                f"weights quantised with {_method(quantised)} are not supported yet; use the original"
            )
        for modality, keys in _MODALITIES.items():
            key = next((key for key in keys if part.get(key)), None)
            if key is not None:
                raise _refusal(f"it takes {modality} ({key} in its config), and only text is supported yet")
    if values.get(_BACKBONE):
        raise _refusal(f"it works on another model's hidden states ({_BACKBONE} in its config), not alone")
    named = values.get("architectures") or ()
    for name in named if isinstance(named, (list, tuple)) else [named]:
        if not isinstance(name, str):
            raise _refusal(f"architectures in its config has {name!r}, which is no class's name")
        for modality, marks in _CLASSES.items():
            if any(mark in name for mark in marks):
                raise _refusal(f"{name} is for {modality}, and only text is supported yet")


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds an adapter, or a model :func:`check_supported` refuses.

    Raises:
        UnsupportedError: see there.
        CheckpointError: ``config.json`` is not JSON.
    """
    if (folder / "adapter_config.json").is_file():
        raise _refusal("it is an adapter (adapter_config.json); merge it into its base model first")
    if (folder / "quantize_config.json").is_file():
        raise _refusal("weights quantised with gptq are not supported yet (quantize_config.json)")
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not a config ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a config, but a {type(config).__name__}")
    check_supported(config)


def _parts(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A config and the configs of the models it is composed of."""
    yield values
    for key in ("text_config", "encoder", "decoder"):
        if isinstance(values.get(key), Mapping):
            yield values[key]


def _method(quantised: Any) -> str:
    if not isinstance(quantised, Mapping):
        quantised = quantised.to_dict()
    if quantised.get("load_in_4bit") or quantised.get("load_in_8bit"):
        return "bitsandbytes"
    return str(
        getattr(quantised.get("quant_method"), "value", quantised.get("quant_method", "an unnamed method"))
    )


def _refusal(message: str) -> UnsupportedError:
    return UnsupportedError(f"model: {message}", field="model")
