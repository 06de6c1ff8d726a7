"""How decoders begin and end is read out of a model's files, generation config first."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import transformers as T

from shoal.engine.admission import Admission
from shoal.engine.decoding import Decoding, read_decoding
from shoal.engine.prompts import BothPrompts, resolve_prompt
from shoal.errors import CheckpointError, RequestError
from shoal.sampling_params import SamplingParams


def folder(path: Path, **generation: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_the_generation_config_comes_first(tmp_path: Path) -> None:
    config = T.BartConfig(decoder_start_token_id=2, forced_eos_token_id=2)
    path = folder(tmp_path, decoder_start_token_id=7, forced_bos_token_id=8)
    assert read_decoding(path, config, 100) == Decoding(7, 8, -1, 100)


def test_without_one_the_config_says(tmp_path: Path) -> None:
    config = T.MarianConfig(decoder_start_token_id=9, forced_eos_token_id=0)
    assert read_decoding(tmp_path, config, 100) == Decoding(9, -1, 0, 100)


@pytest.mark.parametrize(("made_for", "asked", "expected"), [(64, None, 64), (400, None, 400), (400, 90, 90)])
def test_an_encoder_may_be_made_for_other_lengths(
    tmp_path: Path, made_for: int, asked: int | None, expected: int
) -> None:
    config = T.LEDConfig(max_encoder_position_embeddings=made_for, decoder_start_token_id=2)
    assert read_decoding(tmp_path, config, 100, asked).max_encoder_len == expected


def test_a_decoder_that_begins_with_nothing_is_refused(tmp_path: Path) -> None:
    config = T.T5Config(decoder_start_token_id=None, bos_token_id=None)
    with pytest.raises(CheckpointError, match="decoder_start_token_id"):
        read_decoding(tmp_path, config, 100)


def test_what_is_not_done_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder(tmp_path, decoder_start_token_id=2, num_beams=4, min_length=3, bad_words_ids=[[5], [6, 7]])
    with caplog.at_level(logging.WARNING, "shoal.engine"):
        assert read_decoding(path, T.BartConfig(), 100).barred_ids == (5,)
    assert "num_beams 4, min_length 3, bad_words_ids of several tokens" in caplog.text


def admission(decoding: Decoding | None) -> Admission:
    return Admission(
        vocab_size=100, eos_ids=frozenset({2}), model_defaults={}, seed=0, replica_index=0, decoding=decoding
    )


def test_a_prompt_is_the_encoders() -> None:
    spec = admission(Decoding(3, 8, 9, barred_ids=(5,))).spec("a", [11, 12], SamplingParams())
    assert (spec.encoder_ids, spec.prompt_ids) == ([11, 12], [3])
    assert (spec.forced_first_id, spec.forced_last_id) == (8, 9)
    assert spec.sampling[0].logit_bias == {5: -math.inf}


def test_a_decoders_own_beginning_is_completed_and_forces_nothing() -> None:
    decoding = Decoding(3, 8, 9)
    for given in ([3, 4], [4]):
        spec = admission(decoding).spec("a", BothPrompts([11, 12], given), SamplingParams())
        assert (spec.encoder_ids, spec.prompt_ids, spec.forced_first_id) == ([11, 12], [3, 4], -1)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [(BothPrompts([11], [3]), SamplingParams()), ([11], SamplingParams(forced_bos_token_id=4))],
)
def test_what_is_for_encoder_decoders_is_refused_by_others(prompt: list[int], params: SamplingParams) -> None:
    with pytest.raises(RequestError, match="is for encoder-decoders"):
        admission(None).spec("a", prompt, params)


def test_both_prompts_are_resolved() -> None:
    def resolved(prompt: dict[str, Any]) -> tuple[str | None, list[int]]:
        return resolve_prompt(prompt, lambda text: [ord(letter) for letter in text], 128)

    text, ids = resolved({"encoder_prompt": "ab", "decoder_prompt": {"prompt_token_ids": [5]}})
    assert isinstance(ids, BothPrompts) and (text, ids, ids.decoder_ids) == ("ab", [97, 98], [5])
    assert resolved({"encoder_prompt": [7], "decoder_prompt": None}) == (None, [7])
    for wrong in ({"decoder_prompt": [5]}, {"encoder_prompt": "a", "prompt": "b"}):
        with pytest.raises(RequestError, match="encoder-decoder's has the keys"):
            resolved(wrong)
    with pytest.raises(RequestError, match="must be token ids"):
        resolved({"encoder_prompt": "a", "decoder_prompt": "b"})
