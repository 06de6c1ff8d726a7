"""Which file of a folder holds the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.checkpoint.files import find_weights

IN_ORDER = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
]


@pytest.mark.parametrize("first", range(len(IN_ORDER)))
def test_safetensors_come_before_pickles_and_one_file_before_shards(tmp_path: Path, first: int) -> None:
    for name in IN_ORDER[first:]:
        (tmp_path / name).touch()
    assert find_weights(tmp_path) == tmp_path / IN_ORDER[first]


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").mkdir()
    assert find_weights(tmp_path) is None
