"""What generation_config.json and its relatives say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine.generation_defaults import eos_token_ids, model_sampling_defaults
from shoal.errors import CheckpointError
from shoal.sampling_params import SamplingParams


def write(folder: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)


def test_sampling_values_are_read_and_everything_else_left(tmp_path: Path) -> None:
    chosen = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    chosen |= {"no_repeat_ngram_size": 3, "length_penalty": 2.0, "early_stopping": "never"}
    write(tmp_path, {**chosen, "do_sample": True, "max_new_tokens": 5, "eos_token_id": 2})
    assert model_sampling_defaults(tmp_path) == {**chosen, "do_sample": True}


def test_no_file_sets_nothing(tmp_path: Path) -> None:
    assert model_sampling_defaults(tmp_path) == {}


def test_unset_and_null_values_are_not_defaults(tmp_path: Path) -> None:
    write(tmp_path, {"temperature": None, "do_sample": None, "top_k": 50.0})
    assert model_sampling_defaults(tmp_path) == {"top_k": 50}


def test_an_explicit_do_sample_false_makes_unset_requests_greedy(tmp_path: Path) -> None:
    write(tmp_path, {"do_sample": False, "temperature": 0.6})
    defaults = model_sampling_defaults(tmp_path)
    assert SamplingParams().with_defaults(defaults).temperature == 0.0
    assert SamplingParams(temperature=0.5).with_defaults(defaults).temperature == 0.5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot be read"),
        ("[1]", "JSON object"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"do_sample": "no"}, "do_sample"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, content: Any, says: str) -> None:
    write(tmp_path, content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
        model_sampling_defaults(tmp_path)
    assert says in str(caught.value)


def test_bytes_that_are_not_text_are_malformed(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError):
        model_sampling_defaults(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 3}, 4, (2,)),
        ({"eos_token_id": [7, 2, 7]}, {"eos_token_id": 3}, 4, (7, 2)),
        ({}, {"eos_token_id": [3]}, 4, (3,)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, 4, (0,)),
        ({"eos_token_id": []}, {"eos_token_id": -1}, 4, (4,)),
        (None, None, 4, (4,)),
        (None, {}, None, ()),
    ],
)
def test_the_first_source_that_names_an_end_wins(
    tmp_path: Path, generation: Any, config: Any, tokenizer: int | None, expected: tuple[int, ...]
) -> None:
    if generation is not None:
        write(tmp_path, generation)
    named = SimpleNamespace(eos_token_id=tokenizer)
    assert eos_token_ids(tmp_path, config, named) == expected
    as_object = None if config is None else SimpleNamespace(**config)
    assert eos_token_ids(tmp_path, as_object, named) == expected


@pytest.mark.parametrize("value", ["</s>", [2, "x"], 2.5, True])
def test_an_end_that_is_no_id_is_an_error(tmp_path: Path, value: Any) -> None:
    write(tmp_path, {"eos_token_id": value})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        eos_token_ids(tmp_path, None, None)
