"""Old pickles are rewritten once, whoever asks; newer ones never."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint import pickles as module
from shoal.checkpoint.pickles import is_old_pickle, rewritten
from shoal.checkpoint.reader import CheckpointReader

pytestmark = pytest.mark.usefixtures("shoal_home")


def save_old(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    return path


def test_formats_are_told_apart(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "new.bin")
    assert not is_old_pickle(tmp_path / "new.bin")
    assert is_old_pickle(save_old(tmp_path / "old.bin", {"a": torch.ones(1)}))


def test_it_is_loaded_once_however_often_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_old(tmp_path / "pytorch_model.bin", {"a": torch.arange(6.0).reshape(2, 3)})
    calls: list[Path] = []
    load = module.load_pickle

    def counted(path: Path, mapped: bool) -> dict[str, torch.Tensor]:
        calls.append(path)
        return load(path, mapped)

    monkeypatch.setattr(module, "load_pickle", counted)
    for _ in range(3):
        assert torch.equal(CheckpointReader(tmp_path).read("a"), torch.arange(6.0).reshape(2, 3))
    assert len(calls) == 1


def test_a_file_that_changed_is_rewritten_anew(tmp_path: Path) -> None:
    path = save_old(tmp_path / "pytorch_model.bin", {"a": torch.zeros(2)})
    first = rewritten(path)
    save_old(path, {"a": torch.ones(3)})
    assert rewritten(path) != first
    assert torch.equal(CheckpointReader(tmp_path).read("a"), torch.ones(3))


def test_tensors_that_share_memory_each_get_their_values(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    save_old(tmp_path / "pytorch_model.bin", {"a": whole, "b": whole, "turned": whole.T, "row": whole[1]})
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.read("b"), whole)
    assert torch.equal(reader.read("turned"), whole.T)
    assert torch.equal(reader.read("row"), whole[1])
