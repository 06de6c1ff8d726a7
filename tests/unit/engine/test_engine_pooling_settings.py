"""What a sentence-transformers folder says is honoured, and what is not built is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shoal.engine.pooling_settings import PoolingSettings, read_pooling_settings
from shoal.errors import CheckpointError, UnsupportedError
from support.encoders import write_modules


def add_module(folder: Path, kind: str, path: str) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 9, "name": "9", "path": path, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(modules))


def test_a_folder_without_such_files_has_the_default_and_normalises(tmp_path: Path) -> None:
    assert read_pooling_settings(tmp_path, "last") == PoolingSettings("last", normalize=True)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_length_and_norm_are_read(tmp_path: Path, config: dict[str, Any], pooling: str) -> None:
    write_modules(tmp_path, config, norm=False, max_length=33)
    assert read_pooling_settings(tmp_path, "mean") == PoolingSettings(pooling, False, (), 33, False)


def test_a_projection_is_applied(tmp_path: Path) -> None:
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True})
    (tmp_path / "2_Dense").mkdir()
    config = {"in_features": 2, "out_features": 3, "activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(config))
    weight, bias = torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([0.5, 0.0, 0.0])
    tensors = {"linear.weight": weight, "linear.bias": bias}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    add_module(tmp_path, "Dense", "2_Dense")
    [dense] = read_pooling_settings(tmp_path, "mean").dense
    rows = np.array([[0.1, 0.2]], np.float32)
    np.testing.assert_allclose(dense(rows), np.tanh([[1.0, 0.2, 0.1]]), rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "mean_tokens and"),
        ({"pooling_mode_mean_tokens": False}, "nothing"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_another_pooling_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    write_modules(tmp_path, config)
    with pytest.raises(UnsupportedError, match=said):
        read_pooling_settings(tmp_path, "mean")


def test_another_module_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True})
    add_module(tmp_path, "LSTM", "2_LSTM")
    with pytest.raises(UnsupportedError, match="LSTM"):
        read_pooling_settings(tmp_path, "mean")
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_pooling_settings(tmp_path, "mean")
