"""What may be a prompt, and how everything else is refused."""

from __future__ import annotations

from array import array
from typing import Any

import engine_tokenizers
import numpy as np
import pytest
import torch

from shoal.engine.text import Tokenizer
from shoal.errors import RequestError

TOKENIZER = engine_tokenizers.make("byte_level")
IDS = TOKENIZER.encode("hello")


@pytest.mark.parametrize("prompt", ["hello", {"prompt": "hello"}])
def test_text_is_tokenised_and_kept(prompt: Any) -> None:
    assert TOKENIZER.resolve_prompt(prompt) == ("hello", IDS)


@pytest.mark.parametrize(
    "ids", [IDS, tuple(IDS), array("i", IDS), np.array(IDS), torch.tensor(IDS), [np.int64(i) for i in IDS]]
)
def test_ids_of_any_integer_sequence_are_plain_ints(ids: Any) -> None:
    for prompt in (ids, {"prompt_token_ids": ids}):
        text, resolved = TOKENIZER.resolve_prompt(prompt)
        assert text is None and resolved == IDS and all(type(token) is int for token in resolved)


def test_with_both_keys_the_ids_are_served_and_the_text_reported() -> None:
    assert TOKENIZER.resolve_prompt({"prompt": "shown", "prompt_token_ids": [1]}) == ("shown", [1])
    assert TOKENIZER.resolve_prompt({"prompt": None, "prompt_token_ids": [1]}) == (None, [1])


def test_the_callers_list_is_copied() -> None:
    _, resolved = TOKENIZER.resolve_prompt(IDS)
    assert resolved is not IDS


@pytest.mark.parametrize(
    ("prompt", "field", "says"),
    [
        ("", "prompt", "must not be empty"),
        ([], "prompt", "must not be empty"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "must not be empty"),
        ({}, "prompt", "needs one of the keys"),
        ({"prompt": None}, "prompt", "needs one of the keys"),
        ({"prompt": 3}, "prompt", "must be a string, got int"),
        ({"prompt": ["a"]}, "prompt", "must be a string, got list"),
        ({"prompt_token_ids": "hello"}, "prompt_token_ids", "must be a list of token ids, got str"),
        ({"prompt_token_ids": 5}, "prompt_token_ids", "must be a list of token ids, got int"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt", "unknown key 'multi_modal_data'"),
        (None, "prompt", "must be text or a list of token ids, got NoneType"),
        (5, "prompt", "got int"),
        (b"hello", "prompt", "got bytes"),
        ([1, "a"], "prompt", "prompt[1]: must be an integer token id, got 'a'"),
        ([1, 2.0], "prompt", "prompt[1]: must be an integer token id, got 2.0"),
        ([True], "prompt", "prompt[0]: must be an integer token id, got True"),
        ([[1, 2]], "prompt", "prompt[0]: must be an integer token id, got [1, 2]"),
        ([1, -1], "prompt", "prompt[1]: must be a token id from 0 to"),
        ([TOKENIZER.vocab_size], "prompt", "prompt[0]: must be a token id from 0 to"),
        (
            {"prompt_token_ids": [2**70]},
            "prompt_token_ids",
            "prompt_token_ids[0]: must be a token id from 0 to",
        ),
    ],
    ids=str,
)
def test_anything_else_is_refused_by_field(prompt: Any, field: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        TOKENIZER.resolve_prompt(prompt)
    assert caught.value.field == field
    assert str(caught.value).startswith(field) and says in str(caught.value)


def test_text_of_no_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^prompt: must not be empty"):
        engine_tokenizers.make("word_piece").resolve_prompt(" ")


def test_text_whose_tokens_the_model_lacks_is_refused() -> None:
    small = engine_tokenizers.make("byte_level", vocab_size=300)
    with pytest.raises(RequestError, match=r"^prompt: holds token .* 300 tokens"):
        small.resolve_prompt("a<|end|>")


def test_without_a_tokenizer_only_ids_are_served() -> None:
    nothing = Tokenizer(None, vocab_size=10)
    assert nothing.resolve_prompt([9, 0]) == (None, [9, 0])
    with pytest.raises(RequestError, match=r"^prompt: .*no tokenizer"):
        nothing.resolve_prompt("hello")
