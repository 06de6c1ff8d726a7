"""``LLM`` over encoders: vectors, classes, scores and words equal transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from shoal.engine.llm import LLM
from shoal.errors import ConfigError, RequestError, UnsupportedError
from support import encoders

POOLING = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.save(tmp_path_factory.mktemp("encoders") / "bert")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_threads=1, max_num_batched_tokens=40) as llm:
        yield llm


def vectors(outputs: list[Any]) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_vectors_equal_those_of_transformers_in_the_texts_order(llm: LLM, folder: Path, pooling: str) -> None:
    got = vectors(llm.embed(encoders.TEXTS, pooling=pooling))
    torch.testing.assert_close(
        got, encoders.reference_vectors(folder, encoders.TEXTS, pooling), atol=1e-5, rtol=0
    )


def test_a_model_of_latents_fills_masks_and_refuses_to_make_vectors(tmp_path: Path) -> None:
    config = T.PerceiverConfig(
        vocab_size=len(encoders.WORDS), num_latents=5, d_latents=32, d_model=24, num_blocks=1,
        num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2, qk_channels=32,
        v_channels=32, max_position_embeddings=30,
    )  # fmt: skip
    folder = encoders.save(tmp_path / "perceiver", T.PerceiverForMaskedLM, config)
    texts = ["aa [MASK] de", "ab"]
    model = T.PerceiverForMaskedLM.from_pretrained(folder).eval()
    given = encoders.tokenizer()(texts[:1], return_tensors="pt")
    with torch.inference_mode():
        logits = model(given["input_ids"]).logits[0, given["input_ids"][0].tolist().index(4)]
    with LLM(str(folder), num_threads=1) as llm:
        (found,) = llm.fill_mask(texts[:1], top_k=3)
        with pytest.raises(UnsupportedError, match="no vector of each token; it can: fill_mask"):
            llm.embed(texts[1])
    want = logits.softmax(-1).topk(3)
    assert [one.token for one in found.outputs[0]] == want.indices.tolist()
    got = torch.tensor([one.score for one in found.outputs[0]])
    torch.testing.assert_close(got, want.values, atol=1e-5, rtol=1e-4)


def test_a_text_without_the_token_that_classes_are_read_at_is_refused(tmp_path: Path) -> None:
    config = T.BartConfig(
        vocab_size=len(encoders.WORDS), d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=40, decoder_ffn_dim=40,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3, num_labels=3,
    )  # fmt: skip
    folder = encoders.save(tmp_path / "bart", T.BartForSequenceClassification, config)
    ids = [encoders.tokenizer()(text)["input_ids"] for text in encoders.TEXTS[:3]]
    model = T.BartForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        want = torch.cat([model(torch.tensor([one])).logits.softmax(-1) for one in ids])
    with LLM(str(folder), num_threads=1) as llm:
        got = torch.tensor([one.outputs.probs for one in llm.classify(ids)])
        with pytest.raises(RequestError, match=r"reads classes at its end token \(3\)"):
            llm.classify([ids[0], [2, 7, 8]])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_token_ids_are_taken_as_they_are(llm: LLM) -> None:
    ids = encoders.tokenizer()(encoders.TEXTS[0])["input_ids"]
    same = vectors(llm.embed([encoders.TEXTS[0], {"prompt_token_ids": ids}, ids]))
    torch.testing.assert_close(same, same[:1].expand(3, -1))


def test_vectors_are_left_long_and_cut_where_that_is_asked_for(llm: LLM) -> None:
    long = vectors(llm.embed(encoders.TEXTS, normalize=False))
    assert (long.norm(dim=1) - 1).abs().min() > 0.1
    short = vectors(llm.embed(encoders.TEXTS, dimensions=8))
    torch.testing.assert_close(short, torch.nn.functional.normalize(long[:, :8], dim=1))


def test_the_folder_says_how_vectors_are_made_and_how_long_a_text_may_be(tmp_path: Path) -> None:
    folder = encoders.save(tmp_path / "sentence", sentence=POOLING)
    with LLM(str(folder), num_threads=1) as llm:
        assert llm.info.max_model_len == 40
        want = encoders.reference_vectors(folder, encoders.TEXTS, "cls")
        torch.testing.assert_close(vectors(llm.embed(encoders.TEXTS)), want, atol=1e-5, rtol=0)


def test_what_is_too_long_is_refused_unless_it_may_be_cut(llm: LLM) -> None:
    text = " ".join(["ab"] * 70)
    with pytest.raises(RequestError, match=r"prompts\[1\].*72 tokens.*max_model_len \(64\)"):
        llm.embed(["aa", text])
    (cut,) = llm.embed([text], truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == 64 and cut.prompt_token_ids[-1] == 3
    (cut,) = llm.embed(text, truncate_prompt_tokens=5)
    assert len(cut.prompt_token_ids) == 5
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        llm.embed(text, truncate_prompt_tokens=65)


def test_an_encoder_generates_nothing_and_says_so(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match="generates no text"):
        llm.generate("aa")
    with pytest.raises(UnsupportedError, match="does not classify texts; it can: embed"):
        llm.classify("aa")
    with pytest.raises(RequestError, match="pooling"):
        llm.embed("aa", pooling="max")
    with pytest.raises(RequestError, match="must not be empty"):
        llm.embed([])


def test_progress_over_texts_is_shown_where_it_is_asked_for(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(llm.embed(encoders.TEXTS, use_tqdm=True)) == len(encoders.TEXTS)
    assert f"{len(encoders.TEXTS)}/{len(encoders.TEXTS)}" in capsys.readouterr().err
    llm.embed(encoders.TEXTS)
    assert capsys.readouterr().err == ""


def test_a_length_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="65 is more than the model was made for"):
        LLM(str(folder), max_model_len=65)


def test_classes_equal_transformers(tmp_path: Path) -> None:
    config = T.BertConfig(**encoders.SHAPE, num_labels=3, id2label={0: "no", 1: "yes", 2: "maybe"})
    folder = encoders.save(tmp_path / "classes", T.BertForSequenceClassification, config)
    model, backend = T.AutoModelForSequenceClassification.from_pretrained(folder), encoders.tokenizer()
    with LLM(str(folder), num_threads=1) as llm:
        got = llm.classify(encoders.TEXTS)
    for text, output in zip(encoders.TEXTS, got, strict=True):
        with torch.no_grad():
            want = model(**backend(text, return_tensors="pt")).logits[0].softmax(0)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), want, atol=1e-5, rtol=0)
        assert output.outputs.label == config.id2label[int(want.argmax())]


def test_token_classes_equal_transformers(tmp_path: Path) -> None:
    config = T.BertConfig(**encoders.SHAPE, num_labels=4)
    folder = encoders.save(tmp_path / "tokens", T.BertForTokenClassification, config)
    model, backend = T.AutoModelForTokenClassification.from_pretrained(folder), encoders.tokenizer()
    with LLM(str(folder), num_threads=1) as llm:
        got = llm.classify(encoders.TEXTS)
    for text, output in zip(encoders.TEXTS, got, strict=True):
        with torch.no_grad():
            want = model(**backend(text, return_tensors="pt")).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), want, atol=1e-5, rtol=0)


def test_a_cross_encoder_scores_pairs_with_their_token_types(tmp_path: Path) -> None:
    config = T.BertConfig(**encoders.SHAPE, num_labels=1)
    folder = encoders.save(tmp_path / "pairs", T.BertForSequenceClassification, config)
    model, backend = T.AutoModelForSequenceClassification.from_pretrained(folder), encoders.tokenizer()
    with LLM(str(folder), num_threads=1) as llm:
        got = [output.outputs.score for output in llm.score(encoders.TEXTS[0], encoders.TEXTS)]
        with pytest.raises(RequestError, match="2 texts for 3"):
            llm.score(["aa", "ab"], ["aa", "ab", "ac"])
    with torch.no_grad():
        want = [
            model(**backend(encoders.TEXTS[0], text, return_tensors="pt")).logits[0, 0].sigmoid()
            for text in encoders.TEXTS
        ]
    torch.testing.assert_close(torch.tensor(got), torch.stack(want), atol=1e-5, rtol=0)


def test_vectors_score_pairs_by_their_cosine(llm: LLM, folder: Path) -> None:
    rows = encoders.reference_vectors(folder, encoders.TEXTS)
    got = [output.outputs.score for output in llm.score(encoders.TEXTS[0], encoders.TEXTS)]
    torch.testing.assert_close(torch.tensor(got), rows @ rows[0], atol=1e-5, rtol=0)


def test_masks_are_filled_as_transformers_fills_them(tmp_path: Path) -> None:
    folder = encoders.save(tmp_path / "masks", T.BertForMaskedLM)
    model, backend = T.AutoModelForMaskedLM.from_pretrained(folder), encoders.tokenizer()
    texts = ["aa [MASK] bc", "[MASK] ab ac [MASK] ad", "ba bb bc bd [MASK]"]
    with LLM(str(folder), num_threads=1) as llm:
        got = llm.fill_mask(texts, top_k=3)
        with pytest.raises(RequestError, match=r"no mask; write \[MASK\]"):
            llm.fill_mask("aa")
    for text, output in zip(texts, got, strict=True):
        encoded = backend(text, return_tensors="pt")
        with torch.no_grad():
            logits = model(**encoded).logits[0]
        masks = (encoded["input_ids"][0] == 4).nonzero()[:, 0]
        assert len(output.outputs) == len(masks)
        for found, at in zip(output.outputs, masks, strict=True):
            top = logits[at].softmax(0).topk(3)
            assert [word.token for word in found] == top.indices.tolist()
            torch.testing.assert_close(torch.tensor([word.score for word in found]), top.values)
            assert [word.token_str for word in found] == [encoders.WORDS[i] for i in top.indices]


def test_a_decoder_makes_vectors_of_its_last_token_if_it_is_told_to(tmp_path: Path) -> None:
    shape = {name: value for name, value in encoders.SHAPE.items() if name != "hidden_size"}
    config = T.LlamaConfig(**shape, hidden_size=48, num_key_value_heads=3, bos_token_id=2, eos_token_id=3)
    folder = encoders.save(tmp_path / "llama", T.LlamaForCausalLM, config)
    with LLM(str(folder), runner="pooling", num_threads=1) as llm:
        got = vectors(llm.embed(encoders.TEXTS))
    want = encoders.reference_vectors(folder, encoders.TEXTS, "last")
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    with (
        LLM(str(folder), num_threads=1, kv_cache_memory_bytes=1 << 20) as llm,
        pytest.raises(UnsupportedError),
    ):
        llm.embed("aa")
