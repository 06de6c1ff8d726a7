"""Incremental text equals the whole text, and never shows part of a character."""

from __future__ import annotations

import engine_tokenizers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from shoal.engine.detokenise import Detokeniser
from shoal.engine.text import Tokenizer

KINDS = ["byte_level", "byte_fallback", "metaspace", "word_piece", "stripped", "joined"]
TOKENIZERS = {kind: engine_tokenizers.make(kind) for kind in KINDS}
BACKEND = engine_tokenizers.backend("byte_level")
TEXTS = [
    *engine_tokenizers.LINES,
    "",
    " ",
    "   leading and trailing   ",
    "👩🏽‍🚀 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ∀x∈ℝ",
    "a\ufffdb\ufffd\ufffd",
    "<|user|> hi <|end|><|end|>",
]


def byte_ids(text: str) -> list[int]:
    """Byte-level ids of the text's UTF-8, a token per byte."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    ids: list[int] = BACKEND.convert_tokens_to_ids([letter for word, _ in letters for letter in word])
    return ids


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokeniser = Detokeniser(tokenizer, skip)
    return [*(detokeniser.push((i,)) for i in ids), detokeniser.finish()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_real_text_add_up_to_the_whole(kind: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte_fallback"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_ids_add_up_to_the_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    """Special and unknown ids and broken UTF-8 included."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_known + 3), max_size=60))
    assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("num_broken", range(10, 40))
def test_text_behind_a_long_broken_run_adds_up_to_the_whole(num_broken: int) -> None:
    """The run is given out before it is finished, the character behind it still as one piece."""
    tokenizer = TOKENIZERS["byte_level"]
    (lead, *rest) = byte_ids("𝔘")
    ids = [lead] * num_broken + rest + [lead, rest[0]] * num_broken + byte_ids("日x")
    for count in range(len(ids)):
        assert "".join(pieces_of(tokenizer, ids[:count], True)) == tokenizer.decode(ids[:count], True)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bytes_mostly_broken_add_up_to_the_whole(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = data.draw(st.lists(st.sampled_from([*byte_ids("𝔘𝔫日é"), *byte_ids("x")]), max_size=80))
    assert "".join(pieces_of(tokenizer, ids, True)) == tokenizer.decode(ids, True)


@pytest.mark.parametrize("kind", KINDS)
def test_many_skipped_tokens_in_a_row_do_not_lose_what_was_before(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    first, second = tokenizer.encode("the fox"), tokenizer.encode("the dog")
    ids = first + sorted(tokenizer.special_ids) * 20 + second
    assert "".join(pieces_of(tokenizer, ids, True)) == tokenizer.decode(ids, True)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40), skip=st.booleans())
def test_byte_fallback_of_any_text_adds_up_to_the_whole(text: str, skip: bool) -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def test_byte_fallback_keeps_the_characters_it_gave_when_later_bytes_are_broken() -> None:
    """The one documented exception: the decoder turns the whole run into U+FFFD, after the fact."""
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [1 + byte for byte in "é".encode()] + [1 + 0xFF] + tokenizer.encode("x")
    assert tokenizer.decode(ids, True) == "\ufffd\ufffd\ufffd x"
    assert "".join(pieces_of(tokenizer, ids, True)).startswith("é\ufffd")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_piece_shows_part_of_a_character(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = "日😀é🇫🇷"
    pieces = pieces_of(tokenizer, tokenizer.encode(text), True)
    assert all("\ufffd" not in piece for piece in pieces) and "".join(pieces) == text


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    detokeniser = Detokeniser(tokenizer, True)
    assert [detokeniser.push((1 + byte,)) for byte in "😀é".encode()] == ["", "", "", "😀", "", "é"]


def test_an_unfinished_character_is_shown_as_replacement_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    detokeniser = Detokeniser(tokenizer, True)
    assert detokeniser.push(1 + byte for byte in "é😀".encode()[:-1]) == "é"
    assert "\ufffd" in detokeniser.finish()


def test_one_push_of_many_tokens_is_many_pushes() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("".join(TEXTS))
    detokeniser = Detokeniser(tokenizer, True)
    assert detokeniser.push(ids) + detokeniser.finish() == tokenizer.decode(ids, True)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_ordinary_text_is_not_delayed(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    detokeniser = Detokeniser(tokenizer, True)
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    for count, token in enumerate(ids, 1):
        detokeniser_text = detokeniser.push((token,))
        assert detokeniser_text or not tokenizer.decode(ids[:count], True)


@pytest.mark.parametrize(
    "unit", [[65], [0xFF], [257 + 150], [10**6]], ids=["text", "broken", "other", "unknown"]
)
def test_a_token_costs_the_same_however_long_the_text_is(
    unit: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = engine_tokenizers.make("byte_level")
    widths: list[int] = []
    decode = tokenizer.decode_known

    def counting(ids: list[int], skip: bool) -> str:
        widths.append(len(ids))
        return decode(ids, skip)

    monkeypatch.setattr(tokenizer, "decode_known", counting)
    detokeniser = Detokeniser(tokenizer, False)
    detokeniser.push(unit * 2000)
    assert len(widths) <= 2 * 2000 and max(widths, default=0) <= 40


def test_ordinary_text_costs_a_decode_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = engine_tokenizers.make("byte_level")
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 5)
    num_decodes = 0
    decode = tokenizer.decode_known

    def counting(window: list[int], skip: bool) -> str:
        nonlocal num_decodes
        num_decodes += 1
        return decode(window, skip)

    monkeypatch.setattr(tokenizer, "decode_known", counting)
    Detokeniser(tokenizer, False).push(ids)
    assert num_decodes == len(ids) + len(set(ids)), "and each token once alone"
    num_decodes = 0
    Detokeniser(tokenizer, False).push(ids)
    assert num_decodes == len(ids)


def test_special_tokens_leave_text_only_if_kept() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a<|end|>b")
    assert "".join(pieces_of(tokenizer, ids, True)) == "ab"
    assert "".join(pieces_of(tokenizer, ids, False)) == "a<|end|>b"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert pieces_of(Tokenizer(None, vocab_size=10), [1, 2, 3], True) == ["", "", "", ""]
