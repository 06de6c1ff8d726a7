"""The tokenizer as the engine uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_tokenizers
import pytest

from shoal.engine.text import Tokenizer
from shoal.errors import CheckpointError, RequestError

KINDS = ["byte_level", "byte_fallback", "metaspace", "word_piece"]
CHAT = engine_tokenizers.make("byte_level", engine_tokenizers.TEMPLATE)
USER = [{"role": "user", "content": "hi"}]
NOTHING = Tokenizer(None, vocab_size=10)


def rendered(messages: Any, **options: Any) -> str:
    return CHAT.decode(CHAT.render_chat(messages, **options), False)


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_is_transformers_own(kind: str) -> None:
    theirs = engine_tokenizers.backend(kind)
    for line in engine_tokenizers.LINES:
        assert engine_tokenizers.make(kind).encode(line) == theirs(line)["input_ids"]


def test_unpaired_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^prompt: .*surrogates") as caught:
        CHAT.encode("a\ud800b")
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match=r"^messages: .*surrogates"):
        CHAT.render_chat([{"role": "user", "content": "\udfff"}])


def test_a_long_text_is_encoded_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert len(CHAT.encode("word " * 5000)) >= 5000
    assert not caplog.records


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "stripped", "joined"])
def test_decoding_is_transformers_own(kind: str, skip: bool) -> None:
    """Also where a tokenizer's class decodes in its own way."""
    theirs, ours = engine_tokenizers.backend(kind), engine_tokenizers.make(kind)
    for line in engine_tokenizers.LINES:
        ids = ours.encode(" " + line + "<|end|> ")
        for window in (ids, ids[:1], ids[1:3], ids[-2:], []):
            whole = theirs.decode(window, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(window, skip) == whole
            assert [ours.length_alone(i, skip) for i in window] == [
                len(ours.decode([i], skip)) for i in window
            ]


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_tokens_are_what_they_add_to_running_text(kind: str) -> None:
    tokenizer = engine_tokenizers.make(kind)
    ids = tokenizer.encode("The quick brown fox")
    assert "".join(map(tokenizer.decode_token, ids)).strip() == tokenizer.decode(ids, False).strip()
    assert tokenizer.decode_token(ids[-1]) == tokenizer.decode_token(ids[-1])


def test_a_decoded_token_may_be_part_of_a_character_special_or_unknown() -> None:
    tokenizer = engine_tokenizers.make("byte_level")
    assert tokenizer.decode_token(0xFF) == "\ufffd"
    (end,) = tokenizer.encode("<|end|>")
    assert tokenizer.decode_token(end) == "<|end|>"
    assert tokenizer.decode_token(tokenizer.num_known + 5) == ""


def test_ids_without_text_are_left_out_when_decoding() -> None:
    a = CHAT.encode("a")
    assert CHAT.decode([*a, CHAT.num_known, 2**40, -1, *a], True) == "aa"


def test_spaces_are_decoded_as_they_are() -> None:
    assert CHAT.decode(CHAT.encode("a , b . n't"), True) == "a , b . n't"


def test_the_template_writes_the_prompt() -> None:
    conversation = [*USER, {"role": "assistant", "content": "ho"}]
    assert rendered(conversation) == "<|user|>hi<|end|><|user|>ho<|end|><|assistant|>"
    assert rendered(USER, add_generation_prompt=False) == "<|user|>hi<|end|>"
    assert rendered(USER, extra="!") == "<|user|>hi<|end|><|assistant|>!"


def test_special_tokens_of_the_template_are_single_tokens() -> None:
    ids = CHAT.render_chat(USER)
    assert len(ids) == 3 + len(CHAT.encode("hi"))


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered([{"role": "user", "content": parts}]) == "<|user|>one\ntwo<|end|><|assistant|>"


def test_rendering_leaves_the_callers_messages_alone() -> None:
    parts = [{"type": "text", "text": "one"}]
    messages = [{"role": "user", "content": parts}]
    CHAT.render_chat(messages)
    assert messages == [{"role": "user", "content": parts}] and messages[0]["content"] is parts


@pytest.mark.parametrize(
    ("messages", "place", "says"),
    [
        ([], "messages", "must not be empty"),
        ("hi", "messages", "list of messages"),
        ({"role": "user"}, "messages", "list of messages"),
        (["hi"], "messages[0]", "role and content"),
        ([{"content": "hi"}], "messages[0].role", "non-empty string"),
        ([*USER, {"role": 3, "content": "hi"}], "messages[1].role", "non-empty string"),
        ([{"role": "user", "content": 3}], "messages[0].content", "text parts"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content", "text parts"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "'image_url'",
        ),
        ([{"role": "refuse", "content": "hi"}], "messages", "no such role"),
    ],
    ids=str,
)
def test_messages_that_cannot_be_rendered_are_refused_by_place(messages: Any, place: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        CHAT.render_chat(messages)
    assert caught.value.field == "messages"
    assert str(caught.value).startswith(f"{place}: ") and says in str(caught.value)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_dict", "conversation"])
def test_a_request_cannot_replace_the_template_or_the_result(name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        CHAT.render_chat(USER, **{name: "x"})
    assert caught.value.field == "chat_template_kwargs"


def test_a_model_without_a_template_refuses_messages() -> None:
    tokenizer = engine_tokenizers.make("byte_level")
    assert not tokenizer.has_chat_template and CHAT.has_chat_template
    with pytest.raises(RequestError, match=r"^messages: .*no chat template"):
        tokenizer.render_chat(USER)


def test_a_template_that_makes_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^messages: .*no tokens"):
        engine_tokenizers.make("byte_level", "{{ '' }}").render_chat(USER)


def test_without_a_tokenizer_text_is_refused_by_field() -> None:
    assert not NOTHING.is_present and NOTHING.num_known == 0 and NOTHING.eos_token_id is None
    assert NOTHING.decode([1, 2], True) == "" and NOTHING.decode_token(1) == ""
    with pytest.raises(RequestError, match=r"^prompt: .*prompt_token_ids"):
        NOTHING.encode("hi")
    with pytest.raises(RequestError, match=r"^messages: .*no tokenizer"):
        NOTHING.render_chat(USER)


def test_a_saved_tokenizer_is_loaded_with_its_template(tmp_path: Path) -> None:
    engine_tokenizers.backend("byte_level", engine_tokenizers.TEMPLATE).save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path, vocab_size=999)
    assert loaded.is_present and loaded.vocab_size == 999
    assert loaded.encode("日本") == CHAT.encode("日本") and loaded.render_chat(USER) == CHAT.render_chat(USER)
    assert loaded.eos_token_id == CHAT.eos_token_id is not None
    assert loaded.special_ids == {CHAT.encode(token)[0] for token in engine_tokenizers.SPECIAL}


def test_a_folder_without_tokenizer_files_has_no_tokenizer_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not Tokenizer.load(tmp_path, vocab_size=10).is_present
    assert "only prompts of token ids" in caplog.text


def test_a_damaged_tokenizer_is_an_error_not_a_missing_one(tmp_path: Path) -> None:
    engine_tokenizers.backend("byte_level").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer"):
        Tokenizer.load(tmp_path, vocab_size=10)
