"""Fetching from a hub: which files, and one clear error. The hub's client is a stand-in."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from shoal.checkpoint.hub import fetch_from_hub, wanted_files
from shoal.errors import ModelNotFoundError, UnsupportedError


class Hub:
    """A repository of these files, and what was asked of it."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder, self.files = folder, files
        self.downloads: list[list[str]] = []
        self.error: Exception | None = None
        self.cached = False
        self.bars: list[bool] = []

    def model_info(self, name: str, **options: Any) -> Any:
        assert options["timeout"] <= 10
        if self.error is not None:
            raise self.error
        siblings = [types.SimpleNamespace(rfilename=name) for name in self.files]
        return types.SimpleNamespace(siblings=siblings)

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.bars.append(not are_progress_bars_disabled())
        if options.get("local_files_only"):
            if not self.cached:
                raise FileNotFoundError("not cached")
            return str(self.folder)
        self.downloads.append(options["allow_patterns"])
        for file in options["allow_patterns"]:
            (self.folder / file).write_text(self.files[file])
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {"config.json": "{}", "README.md": "", "model.safetensors": "", "pytorch_model.bin": ""}
    stub = Hub(tmp_path, files)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stub.snapshot_download)
    were_disabled = are_progress_bars_disabled()
    enable_progress_bars()
    yield stub
    assert not are_progress_bars_disabled()
    if were_disabled:
        disable_progress_bars()


def test_one_safetensors_file_is_preferred_to_shards_and_pickles() -> None:
    files = ["config.json", "tokenizer.model", "chat_template.jinja", "README.md", "flax_model.msgpack"]
    files += [
        "model.safetensors",
        "model-00001-of-00001.safetensors",
        "pytorch_model.bin",
        "onnx/config.json",
    ]
    small, weights = wanted_files(files)
    assert small == ["config.json", "tokenizer.model", "chat_template.jinja"]
    assert weights == ["model.safetensors"]


def test_shards_are_taken_with_their_index_and_pickles_only_without_safetensors() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    small, weights = wanted_files([*shards, "model.safetensors.index.json", "consolidated.safetensors"])
    assert small == ["model.safetensors.index.json"]
    assert weights == shards
    pickles = ["pytorch_model-00001-of-00001.bin", "training_args.bin", "optimizer.pt"]
    assert wanted_files(pickles)[1] == pickles[:1]


def test_the_config_comes_first_and_then_the_weights(hub: Hub) -> None:
    assert fetch_from_hub("org/name", None, False) == hub.folder
    assert hub.downloads == [["config.json"], ["config.json", "model.safetensors"]]
    assert hub.bars == [False, False]


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub: Hub) -> None:
    hub.files["config.json"] = json.dumps({"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(UnsupportedError, match="awq"):
        fetch_from_hub("org/name", None, False)
    assert len(hub.downloads) == 1


def test_offline_what_was_fetched_before_is_used(hub: Hub) -> None:
    hub.error, hub.cached = ConnectionError("no network"), True
    assert fetch_from_hub("org/name", "main", False) == hub.folder


@pytest.mark.parametrize("error", [ConnectionError("no network"), ValueError("odd"), RuntimeError()])
def test_any_failure_is_one_error_that_names_the_model_and_what_to_try(hub: Hub, error: Exception) -> None:
    hub.error = error
    with pytest.raises(ModelNotFoundError) as caught:
        fetch_from_hub("org/name", None, False)
    assert caught.value.field == "model"
    for word in ("'org/name'", "demo", "a folder", "hub id", type(error).__name__):
        assert word in str(caught.value)
