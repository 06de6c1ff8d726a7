"""What a checkpoint lacks is refused, or made alike on every rank; what it has too much of is reported."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from shoal.checkpoint.load import LoadReport, load_weights
from shoal.checkpoint.reader import CheckpointReader
from shoal.errors import CheckpointError
from shoal.plan.types import TensorSlice

BERT: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 64, "num_labels": 6,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A masked-language-model checkpoint, on which other heads are put."""
    torch.manual_seed(0)
    T.BertForMaskedLM(T.BertConfig(**BERT)).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, parts: dict[str, TensorSlice], **options: Any) -> tuple[Any, LoadReport]:
    """A classifier of which some parameters are cut."""
    model = T.BertForSequenceClassification(T.BertConfig(**BERT)).eval()
    for name, parameter in list(model.named_parameters()):
        path, _, attribute = name.rpartition(".")
        meta = parameter.detach().to("meta")
        if name in parts:
            ranges = parts[name].ranges
            meta = torch.cat([meta.narrow(parts[name].dim, a, b - a) for a, b in ranges], parts[name].dim)
        model.get_submodule(path)._parameters[attribute] = nn.Parameter(meta, requires_grad=False)
    return model, load_weights(model, CheckpointReader(folder), parts, **options)


def test_a_new_head_is_refused_unless_it_is_allowed(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks 4 .*classifier\.weight"):
        load(folder, {})


def test_an_allowed_head_gets_random_values_with_a_warning_and_is_reported_as_transformers_does(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model, report = load(folder, {}, allow_missing=True)
    _, info = T.BertForSequenceClassification.from_pretrained(folder, num_labels=6, output_loading_info=True)
    assert set(report.missing) == set(info["missing_keys"])
    assert set(report.unexpected) == set(info["unexpected_keys"])
    assert "classifier.weight" in caplog.text
    weight, deviation = model.classifier.weight, model.config.initializer_range
    assert 0.5 * deviation < float(weight.std()) < 2 * deviation
    assert bool((model.classifier.bias == 0).all())


def test_ranks_make_parts_of_the_same_values(folder: Path) -> None:
    name = "classifier.weight"
    whole, _ = load(folder, {}, allow_missing=True)
    for ranges in (((0, 2),), ((4, 6), (1, 3))):
        part, _ = load(folder, {name: TensorSlice(0, ranges, 6)}, allow_missing=True)
        expected = torch.cat([whole.classifier.weight[a:b] for a, b in ranges])
        assert torch.equal(part.classifier.weight, expected)


def test_making_values_leaves_the_random_state_alone(folder: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    model, _ = load(folder, {}, allow_missing=True)
    del model
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), expected)


def test_zeros_are_neither_read_nor_missed(folder: Path) -> None:
    name = "bert.embeddings.word_embeddings.weight"
    _, before = load(folder, {}, allow_missing=True)
    model, report = load(folder, {}, allow_missing=True, zeros={name})
    assert bool((model.get_parameter(name) == 0).all())
    assert before.bytes_read - report.bytes_read == 101 * 32 * 4
    assert name not in report.missing


def test_a_tensor_made_in_a_dtype_of_its_own_keeps_it(folder: Path) -> None:
    """As a router's correction bias, in float32 in a model of another dtype."""
    model = T.BertForMaskedLM(T.BertConfig(**BERT)).eval().to(torch.bfloat16).to("meta")
    norm = model.bert.embeddings.LayerNorm
    norm.weight = nn.Parameter(norm.weight.float(), requires_grad=False)
    for name, buffer in list(model.named_buffers()):
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._buffers[attribute] = torch.zeros_like(buffer, device="cpu")
    load_weights(model, CheckpointReader(folder), dtype=torch.float16)
    assert model.bert.embeddings.LayerNorm.weight.dtype is torch.float32
    assert model.bert.embeddings.word_embeddings.weight.dtype is torch.float16
