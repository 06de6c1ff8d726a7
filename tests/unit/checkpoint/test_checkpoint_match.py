"""Checkpoint names and layouts that differ from the model's, as transformers describes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from shoal.checkpoint.lazy import Cut, Joined, Lazy, Stacked, Turned
from shoal.checkpoint.match import match
from shoal.checkpoint.reader import CheckpointReader
from shoal.errors import CheckpointError


def made(lazy: Lazy) -> torch.Tensor:
    out = torch.empty(lazy.shape, dtype=lazy.dtype)
    lazy.read_into({}, out)
    return out


@pytest.fixture
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def convert(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    model: nn.Module,
    converter: WeightConverter,
    stored: dict[str, torch.Tensor],
    wanted: tuple[str, ...],
) -> dict[str, Lazy]:
    """Match with one converter in place of transformers' own."""
    import transformers.conversion_mapping as mapping

    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda model: [converter])
    save_file(stored, folder / "model.safetensors")
    return match(model, CheckpointReader(folder), {name: torch.empty(0) for name in wanted}).sources


def experts(count: int, name: str) -> dict[str, torch.Tensor]:
    return {f"m.experts.{i}.{name}.weight": torch.full((2, 3), float(i)) for i in range(count)}


def test_experts_are_stacked_by_number_not_by_spelling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: LlamaForCausalLM
) -> None:
    converter = WeightConverter("experts.*.down.weight", "experts.down", [MergeModulelist(dim=0)])
    sources = convert(monkeypatch, tmp_path, model, converter, experts(12, "down"), ("m.experts.down",))
    assert isinstance(sources["m.experts.down"], Stacked)
    assert made(sources["m.experts.down"])[:, 0, 0].tolist() == list(range(12))


def test_gate_and_up_are_joined_in_the_order_of_the_patterns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: LlamaForCausalLM
) -> None:
    converter = WeightConverter(
        ["experts.*.up.weight", "experts.*.gate.weight"],
        "experts.up_gate",
        [MergeModulelist(dim=0), Concatenate(dim=1)],
    )
    stored = experts(2, "gate") | {name: value + 10 for name, value in experts(2, "up").items()}
    sources = convert(monkeypatch, tmp_path, model, converter, stored, ("m.experts.up_gate",))
    assert isinstance(sources["m.experts.up_gate"], Joined)
    assert made(sources["m.experts.up_gate"])[:, :, 0].tolist() == [[10, 10, 0, 0], [11, 11, 1, 1]]


def test_a_fused_tensor_is_cut_into_its_targets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: LlamaForCausalLM
) -> None:
    converter = WeightConverter("qkv.weight", ["q.weight", "k.weight", "v.weight"], [Chunk(dim=0)])
    fused = torch.arange(12.0).reshape(6, 2)
    names = ("a.q.weight", "a.k.weight", "a.v.weight")
    sources = convert(monkeypatch, tmp_path, model, converter, {"a.qkv.weight": fused}, names)
    assert all(isinstance(source, Cut) for source in sources.values())
    assert torch.equal(torch.cat([made(sources[name]) for name in names]), fused)


def test_a_turned_tensor_is_turned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: LlamaForCausalLM
) -> None:
    stored = torch.arange(6.0).reshape(2, 3)
    converter = WeightConverter("old", "new", [Transpose(0, 1)])
    sources = convert(monkeypatch, tmp_path, model, converter, {"a.old": stored}, ("a.new",))
    assert isinstance(sources["a.new"], Turned)
    assert torch.equal(made(sources["a.new"]), stored.T)


class _Fails(ConversionOps):
    def convert(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        raise IndexError("deep inside")


def test_a_conversion_that_fails_is_an_error_that_names_the_tensor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: LlamaForCausalLM
) -> None:
    converter = WeightConverter("old", "new", [_Fails()])
    sources = convert(monkeypatch, tmp_path, model, converter, {"a.old": torch.ones(1)}, ("a.new",))
    with pytest.raises(CheckpointError, match=r"a\.new.*a\.old.*deep inside"):
        made(sources["a.new"])


def test_tensors_that_make_nothing_wanted_are_unexpected(tmp_path: Path, model: LlamaForCausalLM) -> None:
    save_file({"lm_head.weight": torch.ones(1), "other": torch.ones(1)}, tmp_path / "model.safetensors")
    matches = match(model, CheckpointReader(tmp_path), {"lm_head.weight": torch.empty(0)})
    assert list(matches.sources) == ["lm_head.weight"]
    assert matches.unexpected == ["other"]


def test_unexpected_names_are_those_that_transformers_gives_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: LlamaForCausalLM
) -> None:
    import transformers.conversion_mapping as mapping

    converter = WeightConverter("qkv.weight", ["q.weight", "k.weight"], [Chunk(dim=0)])
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda model: [converter])
    save_file({"b.qkv.weight": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    matches = match(model, CheckpointReader(tmp_path), {"a.q.weight": torch.empty(0)})
    assert matches.unexpected == ["b.q.weight", "b.k.weight"]
