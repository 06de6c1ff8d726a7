"""Which class a config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as T

from shoal.errors import UnsupportedError
from shoal.model.build import load_config
from shoal.model.classes import architecture_class


@pytest.mark.parametrize(
    ("config", "named", "wanted"),
    [
        (T.BertConfig, "BertForSequenceClassification", T.BertForSequenceClassification),
        (T.BertConfig, "BertModel", T.BertModel),
        (T.T5Config, "T5EncoderModel", T.T5EncoderModel),
        (T.BertConfig, None, T.BertForMaskedLM),
        (lambda: T.BertConfig(is_decoder=True), None, T.BertLMHeadModel),
        (T.LlamaConfig, None, T.LlamaForCausalLM),
        (T.T5Config, None, T.T5ForConditionalGeneration),
        (T.BartConfig, None, T.BartForConditionalGeneration),
        (T.LlamaConfig, "NoSuchClassOfTransformers", T.LlamaForCausalLM),
    ],
)
def test_the_named_class_is_taken_or_what_suits_the_config(
    config: Any, named: str | None, wanted: Any
) -> None:
    made = config()
    made.architectures = [named] if named else None
    assert architecture_class(made) is wanted


def test_a_class_name_outside_a_list_is_taken_as_one() -> None:
    config = T.LlamaConfig()
    config.architectures = "LlamaForSequenceClassification"
    assert architecture_class(config) is T.LlamaForSequenceClassification


@pytest.mark.parametrize("value", [[7], 7, {"LlamaForCausalLM": 1}])
def test_architectures_that_are_no_names_are_refused(value: Any) -> None:
    config = T.LlamaConfig()
    config.architectures = value
    with pytest.raises(UnsupportedError, match=r"architectures in its config is .*7|.*LlamaForCausalLM"):
        architecture_class(config)


CODE = """
import transformers as T

class OwnConfig(T.LlamaConfig):
    model_type = "own"

class OwnForCausalLM(T.LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own_checkpoint"
    T.LlamaConfig(architectures=["OwnForCausalLM"]).save_pretrained(folder)
    text = (folder / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "own"')
    reference = (
        '"auto_map": {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnForCausalLM"}, '
    )
    (folder / "config.json").write_text(text.replace("{", "{" + reference, 1))
    (folder / "code.py").write_text(CODE)
    return folder


def test_code_that_comes_with_a_checkpoint_is_run_only_where_it_is_trusted(own_code: Path) -> None:
    config = load_config(own_code, trust_remote_code=True)
    assert architecture_class(config, own_code, True).__name__ == "OwnForCausalLM"
    with pytest.raises(UnsupportedError, match="pass trust_remote_code"):
        architecture_class(config, own_code, False)


def test_a_config_that_nothing_is_made_for_is_refused() -> None:
    class Strange(T.PreTrainedConfig):  # type: ignore[misc]
        model_type = "strange"

    with pytest.raises(UnsupportedError, match="Strange"):
        architecture_class(Strange())
