"""What is not built is refused by name; text models pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as T

from shoal.checkpoint.support import check_folder, check_supported
from shoal.errors import CheckpointError, UnsupportedError


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
        ({"vision_config": {"hidden_size": 8}, "text_config": {}}, "images"),
        ({"audio_config": {"hidden_size": 8}}, "audio"),
        ({"num_mel_bins": 80}, "audio"),
        ({"audio_channels": 1}, "audio"),  # musicgen: its ids are codes of sound
        ({"audio_token_index": 49155}, "audio"),
        ({"acoustic_tokenizer_encoder_config": {"hidden_size": 8}}, "audio"),
        ({"backbone_hidden_size": 1536}, "another model's hidden states"),  # gemma 4's draft models
        ({"architectures": ["ViTForImageClassification"]}, "images"),
        ({"architectures": ["VisionEncoderDecoderModel"]}, "images"),
        ({"architectures": ["Wav2Vec2ForCTC"]}, "audio"),
        ({"architectures": "Wav2Vec2ForCTC"}, "Wav2Vec2ForCTC is for audio"),
        ({"architectures": [7]}, "architectures in its config has 7"),
        ({"architectures": 7}, "architectures in its config has 7"),
    ],
)
def test_what_is_not_built_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named) as caught:
        check_supported(config)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None, "vision_config": None, "architectures": None},
        {"quantization_config": {}, "architectures": ["LlamaForCausalLM"]},
        T.LlamaConfig(),
        T.T5Config(),
        T.PerceiverConfig(),
        T.BartConfig(forced_eos_token_id=2),
        T.MambaConfig(),
    ],
)
def test_text_models_pass(config: Any) -> None:
    check_supported(config)


@pytest.mark.parametrize("config", [T.CLIPConfig(), T.WhisperConfig(), T.Gemma3Config()])
def test_configs_of_other_modalities_are_refused(config: Any) -> None:
    with pytest.raises(UnsupportedError, match="only text"):
        check_supported(config)


@pytest.mark.parametrize(
    ("name", "named"), [("adapter_config.json", "adapter"), ("quantize_config.json", "gptq")]
)
def test_a_folder_with_an_adapter_or_old_quantisation_is_refused(
    tmp_path: Path, name: str, named: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("{}")
    with pytest.raises(UnsupportedError, match=named):
        check_folder(tmp_path)


def test_a_folders_config_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UnsupportedError, match="awq"):
        check_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_config_that_is_no_json_object_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_folder(tmp_path)
