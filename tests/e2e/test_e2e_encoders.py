"""Encoders of the zoo over ranks: texts of different lengths at once give what transformers gives one
by one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.main import main
from support import encoders
from support.zoo.encode import encode
from support.zoo.encoders import ENCODERS
from support.zoo.serve import save
from support.zoo.unlisted_encoders import UNLISTED_ENCODERS

FAMILIES = {
    name: family
    for name, family in {**ENCODERS, **UNLISTED_ENCODERS}.items()
    if family.kind == "encoder" and family.is_known
}

WAYS = {"albert": "packed", "bert": "packed", "modernbert": "packed", "deberta_v2": "padded"}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", list(WAYS))
def test_an_encoder_over_ranks_equals_transformers(name: str, ranks: int, folder: Path) -> None:
    found = encode(FAMILIES[name], save(FAMILIES[name], folder), ranks)
    assert found.way == WAYS[name]
    assert found.error < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_encoder_equals_transformers(name: str, ranks: int, folder: Path) -> None:
    assert encode(FAMILIES[name], save(FAMILIES[name], folder), ranks).error < TOLERANCE


def test_the_command_line_cuts_texts_only_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logging_restored: None
) -> None:
    path = encoders.save(tmp_path / "bert")
    arguments = ["generate", str(path), "--task", "embed", "-p", "aa " * 70, "--num-threads", "1"]
    assert main(arguments) == 2
    assert "72 tokens, which exceeds max_model_len (64)" in capsys.readouterr().err
    assert main([*arguments, "--truncate-prompt-tokens", "-1"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 64
