"""Loaded models equal transformers' own loading bit for bit, whole or in parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.checkpoint.load import load_weights
from shoal.checkpoint.reader import CheckpointReader
from shoal.errors import CheckpointError

SHAPE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 101, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}  # fmt: skip

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**SHAPE, num_key_value_heads=2)),
    "llama tied": lambda: T.LlamaForCausalLM(
        T.LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "gpt2": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(
            vocab_size=101, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
        )
    ),
    "bloom": lambda: T.BloomForCausalLM(
        T.BloomConfig(vocab_size=101, hidden_size=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "opt": lambda: T.OPTForCausalLM(
        T.OPTConfig(
            vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=96,
            max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "mixtral": lambda: T.MixtralForCausalLM(
        T.MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=12, num_experts_per_tok=2)
    ),
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**{**SHAPE, "bos_token_id": None, "eos_token_id": None})),
    "bart": lambda: T.BartForConditionalGeneration(T.BartConfig(**BART)),
    "marian": lambda: T.MarianMTModel(T.MarianConfig(**BART)),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    dim: int
    ranges: tuple[tuple[int, int], ...]


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():  # zero biases and unit norms would hide a tensor that was not loaded
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def empty(model: Any) -> Any:
    """A copy on meta, its non-persistent buffers real, as a model is before loading."""
    with torch.device("meta"):
        copy = type(model)(model.config)
    persistent = set(copy.state_dict())
    for name, buffer in model.named_buffers():
        if name not in persistent:
            path, _, attribute = name.rpartition(".")
            copy.get_submodule(path)._buffers[attribute] = buffer.clone()
    return copy.eval()


def assert_same(model: Any, reference: Any) -> None:
    ours, theirs = model.state_dict(), reference.state_dict()
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert different == []


def ties(model: nn.Module) -> set[tuple[str, str]]:
    named = list(model.named_parameters(remove_duplicate=False))
    return {(a, b) for a, x in named for b, y in named if a < b and x is y}


@pytest.mark.parametrize("shard_size", ["5GB", "40KB"])
@pytest.mark.parametrize("name", MODELS)
def test_a_full_load_equals_from_pretrained_bit_for_bit(tmp_path: Path, name: str, shard_size: str) -> None:
    random_model(name).save_pretrained(tmp_path, max_shard_size=shard_size)
    reference = type(random_model(name)).from_pretrained(tmp_path)
    model = empty(reference)
    reader = CheckpointReader(tmp_path)
    report = load_weights(model, reader, {}, "cpu", torch.float32)
    assert_same(model, reference)
    assert ties(model) == ties(reference)
    assert report.unexpected == ()
    stored = sum(p.numel() for p in reference.parameters()) * 4
    assert report.bytes_read == reader.bytes_read <= stored + 4 * 101
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_loading_twice_from_one_reader_counts_each_report_alone(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    reader = CheckpointReader(tmp_path)
    reports = [load_weights(empty(random_model("llama")), reader) for _ in range(2)]
    assert reports[0].bytes_read == reports[1].bytes_read == reader.bytes_read // 2


def sharded(model: Any, parts: dict[str, Part]) -> Any:
    """The model on meta with these parameters cut to their parts' sizes."""
    copy = empty(model)
    for name, part in parts.items():
        path, _, attribute = name.rpartition(".")
        module = copy.get_submodule(path)
        shape = list(getattr(module, attribute).shape)
        shape[part.dim] = sum(stop - start for start, stop in part.ranges)
        module._parameters[attribute] = nn.Parameter(torch.empty(shape, device="meta"))
    return copy


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama", {
            "model.layers.0.self_attn.q_proj.weight": Part(0, ((0, 16), (32, 48))),
            "model.layers.1.mlp.down_proj.weight": Part(1, ((8, 40),)),
            "lm_head.weight": Part(0, ((51, 101),)),
        }),
        ("gpt2", {
            "transformer.h.0.attn.c_attn.weight": Part(1, ((0, 32), (64, 96), (128, 160))),
            "transformer.h.0.attn.c_attn.bias": Part(0, ((0, 32), (64, 96), (128, 160))),
        }),
        ("mixtral", {
            "model.layers.0.mlp.experts.gate_up_proj": Part(0, ((1, 2), (10, 12))),
            "model.layers.1.mlp.experts.gate_up_proj": Part(1, ((0, 48), (96, 144))),
            "model.layers.1.mlp.experts.down_proj": Part(2, ((0, 48),)),
        }),
    ],
)  # fmt: skip
def test_a_sliced_load_equals_slicing_and_reads_no_more(
    tmp_path: Path, name: str, parts: dict[str, Part]
) -> None:
    whole = random_model(name)
    whole.save_pretrained(tmp_path)
    model = sharded(whole, parts)
    report = load_weights(model, CheckpointReader(tmp_path), parts)
    for key, value in model.state_dict().items():
        expected = whole.state_dict()[key]
        if key in parts:
            ranges = parts[key].ranges
            expected = torch.cat(
                [expected.narrow(parts[key].dim, a, b - a) for a, b in ranges], parts[key].dim
            )
        assert torch.equal(value, expected), key
    local = {parameter.data_ptr(): parameter.numel() * 4 for parameter in model.parameters()}
    assert report.bytes_read == sum(local.values())


def test_tied_tensors_cut_alike_stay_one_and_are_read_once(tmp_path: Path) -> None:
    whole = random_model("llama tied")
    whole.save_pretrained(tmp_path)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    parts = dict.fromkeys(names, Part(0, ((0, 50),)))
    model = sharded(whole, parts)
    load_weights(model, CheckpointReader(tmp_path), parts)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, whole.lm_head.weight[:50])


def test_tied_tensors_cut_apart_each_get_their_own_part(tmp_path: Path) -> None:
    whole = random_model("llama tied")
    whole.save_pretrained(tmp_path)
    parts = {"model.embed_tokens.weight": Part(0, ((0, 50),)), "lm_head.weight": Part(0, ((51, 101),))}
    model = sharded(whole, parts)
    load_weights(model, CheckpointReader(tmp_path), parts)
    assert torch.equal(model.model.embed_tokens.weight, whole.lm_head.weight[:50])
    assert torch.equal(model.lm_head.weight, whole.lm_head.weight[51:])


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.embed_tokens.weight", "both"])
def test_a_tied_tensor_may_be_stored_under_either_name_or_both(tmp_path: Path, stored: str) -> None:
    whole = random_model("llama tied")
    whole.save_pretrained(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values = tensors.pop("model.embed_tokens.weight")
        names = ("lm_head.weight", "model.embed_tokens.weight") if stored == "both" else (stored,)
        return tensors | {name: values.clone() for name in names}

    rewrite(tmp_path, change)
    model = empty(whole)
    load_weights(model, CheckpointReader(tmp_path))
    assert_same(model, whole)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_names_stored_with_different_values_are_kept_apart_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = random_model("llama tied")
    whole.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": torch.ones(101, 64)})
    model = empty(whole)
    with caplog.at_level(logging.WARNING):
        load_weights(model, CheckpointReader(tmp_path))
    assert_same(model, type(whole).from_pretrained(tmp_path))
    assert "lm_head.weight is tied" in caplog.text


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama"])
@pytest.mark.parametrize("change", ["without the base model's name", "with it twice over"])
def test_checkpoints_of_the_bare_model_load_into_the_model_with_a_head(
    tmp_path: Path, name: str, change: str
) -> None:
    """gpt2's and bloom's own checkpoints have no ``transformer.`` in front."""
    whole = random_model(name)
    prefix = f"{whole.base_model_prefix}."
    whole.save_pretrained(tmp_path)
    if change == "without the base model's name":
        rewrite(tmp_path, lambda tensors: {key.removeprefix(prefix): value for key, value in tensors.items()})
        model = empty(whole)
        load_weights(model, CheckpointReader(tmp_path))
        assert_same(model, whole)
    else:
        base = empty(getattr(whole, whole.base_model_prefix))
        load_weights(base, CheckpointReader(tmp_path))
        assert_same(base, getattr(whole, whole.base_model_prefix))


def test_old_names_of_layer_norms_are_understood(tmp_path: Path) -> None:
    whole = random_model("bert")
    whole.save_pretrained(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        def old(name: str) -> str:
            return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )

        return {old(name): value for name, value in tensors.items()}

    rewrite(tmp_path, change)
    model = empty(whole)
    load_weights(model, CheckpointReader(tmp_path))
    assert_same(model, whole)


def test_a_missing_weight_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = random_model("llama")
    whole.save_pretrained(tmp_path)
    gone = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path, lambda tensors: {name: value for name, value in tensors.items() if name != gone})
    with pytest.raises(CheckpointError, match=gone):
        load_weights(empty(whole), CheckpointReader(tmp_path))


def test_a_missing_tied_weight_is_an_error_too(tmp_path: Path) -> None:
    whole = random_model("llama tied")
    whole.save_pretrained(tmp_path)
    gone = "model.embed_tokens.weight"
    rewrite(tmp_path, lambda tensors: {name: value for name, value in tensors.items() if name != gone})
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        load_weights(empty(whole), CheckpointReader(tmp_path))


def test_a_shape_that_does_not_fit_is_an_error_with_both_shapes(tmp_path: Path) -> None:
    whole = random_model("llama")
    whole.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"model.norm.weight": torch.ones(65)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\[65\].*\[64\]"):
        load_weights(empty(whole), CheckpointReader(tmp_path))


@pytest.mark.parametrize("piece", ["w1", "w2", "w3"])
def test_a_missing_piece_of_one_expert_is_an_error_that_names_the_tensor(tmp_path: Path, piece: str) -> None:
    whole = random_model("mixtral")
    whole.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if f".3.{piece}" not in k})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts"):
        load_weights(empty(whole), CheckpointReader(tmp_path))


def test_unexpected_tensors_are_reported_and_logged_but_old_rotary_tables_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = random_model("llama")
    whole.save_pretrained(tmp_path)
    extra = {"extra.weight": torch.ones(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(tmp_path, lambda tensors: tensors | extra)
    with caplog.at_level(logging.INFO):
        report = load_weights(empty(whole), CheckpointReader(tmp_path))
    assert report.unexpected == ("extra.weight",)
    assert "extra.weight" in caplog.text
    assert "inv_freq" not in caplog.text


def test_tensors_a_class_makes_itself_may_be_missing(tmp_path: Path) -> None:
    """Marian's tables of sines are not stored; from_pretrained computes them, and so do we."""
    whole = random_model("marian")
    whole.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if "embed_positions" not in k})
    reference = type(whole).from_pretrained(tmp_path)
    model = empty(whole)
    report = load_weights(model, CheckpointReader(tmp_path))
    assert_same(model, reference)
    assert report.missing == ()


def test_a_given_dtype_applies_to_floating_point_and_spares_what_the_class_keeps(tmp_path: Path) -> None:
    whole = random_model("llama")
    whole.save_pretrained(tmp_path)
    model = empty(whole)
    model._keep_in_fp32_modules_strict = {"model.norm"}
    model.register_buffer("count", torch.tensor(3))
    load_weights_with_count(tmp_path, model)
    assert model.model.norm.weight.dtype is torch.float32
    assert model.lm_head.weight.dtype is torch.bfloat16
    assert torch.equal(model.lm_head.weight, whole.lm_head.weight.bfloat16())
    assert model.count.dtype is torch.int64


def load_weights_with_count(folder: Path, model: Any) -> None:
    rewrite(folder, lambda tensors: tensors | {"count": torch.tensor(5)})
    load_weights(model, CheckpointReader(folder), dtype=torch.bfloat16)
    assert model.count == 5


def test_without_a_dtype_each_tensor_has_the_models_own(tmp_path: Path) -> None:
    whole = random_model("llama")
    whole.save_pretrained(tmp_path)
    model = empty(whole).to(torch.float64)
    load_weights(model, CheckpointReader(tmp_path))
    assert model.lm_head.weight.dtype is torch.float64


def test_pickled_checkpoints_load_as_well(tmp_path: Path) -> None:
    whole = random_model("llama tied")
    whole.save_pretrained(tmp_path)
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    model = empty(whole)
    load_weights(model, CheckpointReader(tmp_path))
    assert_same(model, whole)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_progress_is_told_of_every_tensor(tmp_path: Path) -> None:
    whole = random_model("llama")
    whole.save_pretrained(tmp_path)
    calls: list[tuple[int, int]] = []
    load_weights(
        empty(whole), CheckpointReader(tmp_path), progress=lambda done, total: calls.append((done, total))
    )
    total = len(whole.state_dict())
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_a_plain_module_loads_by_its_own_names(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    save_file({"0.weight": torch.ones(2, 3), "0.bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    load_weights(module.to("meta"), CheckpointReader(tmp_path))
    assert torch.equal(module[0].weight, torch.ones(2, 3))


def test_a_buffer_left_on_meta_is_our_own_fault_and_named(tmp_path: Path) -> None:
    whole = random_model("llama")
    whole.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = type(whole)(whole.config)
    with pytest.raises(AssertionError, match="inv_freq"):
        load_weights(model, CheckpointReader(tmp_path))
