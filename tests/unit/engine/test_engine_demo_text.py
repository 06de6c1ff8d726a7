"""The demo model's own tokenizer: byte-level BPE of 49152 tokens with a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from shoal.engine.detokenise import Detokeniser
from shoal.engine.generation_defaults import eos_token_ids
from shoal.engine.text import Tokenizer

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.load(demo_path, vocab_size=49152)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 300) | st.integers(0, 49160), max_size=80), skip=st.booleans())
def test_pieces_of_any_ids_add_up_to_the_whole(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    detokeniser = Detokeniser(tokenizer, skip)
    text = "".join(detokeniser.push((i,)) for i in ids) + detokeniser.finish()
    assert text == tokenizer.decode(ids, skip)


def test_a_conversation_is_rendered_as_transformers_does(tokenizer: Tokenizer, demo_path: Path) -> None:
    messages = [{"role": "user", "content": "Wie groß ist 日本?"}]
    theirs = AutoTokenizer.from_pretrained(demo_path).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.render_chat(messages) == theirs


def test_the_turns_end_ends_a_sequence(tokenizer: Tokenizer, demo_path: Path) -> None:
    assert eos_token_ids(demo_path, None, tokenizer) == tuple(tokenizer.encode("<|im_end|>"))
