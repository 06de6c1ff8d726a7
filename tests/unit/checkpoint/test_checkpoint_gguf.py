"""A GGUF file becomes a folder that transformers loads as the model it was made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.checkpoint.gguf import convert, open_gguf
from shoal.errors import CheckpointError, UnsupportedError

MakeGguf = Callable[..., Path]


def ignore(done: float, total: float) -> None:
    return None


@pytest.mark.parametrize("tied", [False, True])
def test_the_converted_folder_holds_the_same_model(
    tmp_path: Path, make_llama: Callable[..., Any], make_gguf: MakeGguf, tied: bool
) -> None:
    model = make_llama(tied)
    file = open_gguf(make_gguf(tmp_path / "m.gguf", model))
    folder = tmp_path / "out"
    folder.mkdir()
    told: list[tuple[float, float]] = []
    convert(file, folder, lambda done, total: told.append((done, total)))

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    with safe_open(folder / "model.safetensors", "pt") as stored:
        assert ("lm_head.weight" in stored.keys()) is not tied  # noqa: SIM118
        assert {stored.get_slice(name).get_dtype() for name in stored.keys()} == {"F32"}  # noqa: SIM118
    assert loaded.generation_config.eos_token_id == 2
    assert told[-1][0] == told[-1][1] == len(told)


def test_the_tokenizer_is_saved_with_its_template_and_the_files_special_tokens(
    tmp_path: Path, make_llama: Callable[..., Any], make_gguf: MakeGguf
) -> None:
    path = make_gguf(tmp_path / "m.gguf", make_llama())
    folder = tmp_path / "out"
    folder.mkdir()
    convert(open_gguf(path), folder, ignore)
    saved = AutoTokenizer.from_pretrained(folder)
    direct = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    text = "some text, <|im_start|>é and 12\n\n3<|im_end|>"
    assert saved(text).input_ids == direct(text).input_ids
    assert (saved.bos_token_id, saved.eos_token_id, saved.unk_token_id, saved.pad_token_id) == (1, 2, 0, 2)
    assert saved.decode(saved("a , b .").input_ids) == "a , b ."
    chat = saved.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"


def test_quantised_blocks_are_unpacked(
    tmp_path: Path, make_llama: Callable[..., Any], make_gguf: MakeGguf
) -> None:
    model = make_llama()
    path = make_gguf(tmp_path / "m.gguf", model, quantised="blk.0.ffn_down.weight")
    folder = tmp_path / "out"
    folder.mkdir()
    file = open_gguf(path)
    assert file.dequantised_bytes == sum(p.numel() for p in model.parameters()) * 4
    convert(file, folder, ignore)
    loaded = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.down_proj.weight
    original = model.model.layers[0].mlp.down_proj.weight
    assert not torch.equal(loaded, original)
    assert (loaded - original).abs().max() <= original.abs().max() / 127  # Q8_0 keeps 8 bits a value


def test_weights_that_are_missing_are_named(
    tmp_path: Path, make_llama: Callable[..., Any], make_gguf: MakeGguf
) -> None:
    path = make_gguf(tmp_path / "m.gguf", make_llama(), leave_out="blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        convert(open_gguf(path), tmp_path, ignore)


@pytest.mark.parametrize("keep", [0, 3, 1000, 60_000])
def test_a_damaged_file_is_an_error_that_names_it(
    tmp_path: Path, make_llama: Callable[..., Any], make_gguf: MakeGguf, keep: int
) -> None:
    path = make_gguf(tmp_path / "m.gguf", make_llama())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        open_gguf(path)


def test_a_tokenizer_that_cannot_be_built_is_an_error_that_names_the_file(
    tmp_path: Path, make_llama: Callable[..., Any], make_gguf: MakeGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise Exception("token out of vocabulary")  # the tokenizers package raises nothing narrower

    path = make_gguf(tmp_path / "m.gguf", make_llama())
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match=r"m\.gguf.*token out of vocabulary"):
        convert(open_gguf(path), tmp_path, ignore)


def test_an_architecture_transformers_does_not_read_is_refused_by_name(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "rwkv6")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="rwkv6"):
        convert(open_gguf(tmp_path / "m.gguf"), tmp_path, ignore)
