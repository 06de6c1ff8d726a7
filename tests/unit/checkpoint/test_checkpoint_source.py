"""From what a user calls a model to its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import source
from shoal.checkpoint.source import check_supported, resolve
from shoal.errors import CheckpointError, ModelNotFoundError, UnsupportedError, UsageError
from shoal.home import home


def model_folder(folder: Path, config: dict[str, Any] | None = None, weights: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if weights:
        (folder / "model.safetensors").touch()
    return folder


@pytest.mark.parametrize("as_text", [True, False])
def test_a_folder_is_itself(tmp_path: Path, as_text: bool) -> None:
    folder = model_folder(tmp_path / "m", {"model_type": "llama"})
    assert resolve(str(folder) if as_text else folder) == folder


def test_a_home_relative_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m" if model_folder(tmp_path / "m", {}) else "") == tmp_path / "m"


def test_demo_is_always_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a folder has that name: ``./demo`` is the folder."""
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "demo", {})
    monkeypatch.setattr(source, "fetch_demo", lambda progress: tmp_path / f"fetched {progress}")
    assert resolve("demo", progress=False) == tmp_path / "fetched False"
    assert resolve("./demo") == Path("demo")


def test_a_folder_without_config_or_weights_says_which(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve(model_folder(tmp_path / "a"))
    with pytest.raises(ModelNotFoundError, match="no weights"):
        resolve(model_folder(tmp_path / "b", {}, weights=False))


def test_a_folder_of_an_adapter_or_of_quantised_weights_is_refused_by_name(tmp_path: Path) -> None:
    adapter = model_folder(tmp_path / "a", weights=False)
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="adapter"):
        resolve(adapter)
    with pytest.raises(UnsupportedError, match="gptq"):
        resolve(model_folder(tmp_path / "q", {"quantization_config": {"quant_method": "gptq"}}))


@pytest.mark.parametrize(
    "name",
    ["", ".hidden/../x", "a b", "http://host/m", "a/b/c", "/nowhere", "./nowhere", "x.gguf", "a/b.GGUF"],
)
def test_what_is_no_folder_and_no_hub_id_is_refused_without_asking_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "fetch_from_hub", lambda *arguments: pytest.fail("the hub was asked"))
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)
    assert caught.value.field == "model"


def test_any_other_name_is_asked_of_the_hub_with_its_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def fetch(name: str, revision: str | None, progress: bool) -> Path:
        asked.append((name, revision, progress))
        return model_folder(tmp_path / "hub", {})

    monkeypatch.setattr(source, "fetch_from_hub", fetch)
    assert resolve("org/name-1.5B", "v1", progress=False) == tmp_path / "hub"
    assert resolve("gpt2") == tmp_path / "hub"
    assert asked == [("org/name-1.5B", "v1", False), ("gpt2", None, True)]


def test_an_unreachable_hub_is_an_error_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    started = time.monotonic()
    with pytest.raises(ModelNotFoundError, match="nobody/no-such-model"):
        resolve("nobody/no-such-model", progress=False)
    assert time.monotonic() - started < 10


def test_a_gguf_file_is_converted_once_and_its_bytes_are_said_first(
    tmp_path: Path,
    shoal_home: Path,
    capfd: pytest.CaptureFixture[str],
    make_llama: Callable[..., Any],
    make_gguf: Callable[..., Path],
) -> None:
    path = make_gguf(tmp_path / "m.gguf", make_llama())
    folder = resolve(path)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("m.gguf takes 0.00 GB dequantised to float32")
    assert folder.is_relative_to(shoal_home)
    assert (folder / "model.safetensors").is_file()

    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(path)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert capfd.readouterr() == ("", "")


def test_a_gguf_file_that_changed_is_converted_anew(
    tmp_path: Path, shoal_home: Path, make_llama: Callable[..., Any], make_gguf: Callable[..., Path]
) -> None:
    path = make_gguf(tmp_path / "m.gguf", make_llama(seed=0))
    first = resolve(path, progress=False)
    make_gguf(path, make_llama(seed=1))
    assert resolve(path, progress=False) != first


def test_a_damaged_gguf_file_is_an_error_and_leaves_no_folder(tmp_path: Path, shoal_home: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        resolve(tmp_path / "m.gguf", progress=False)
    assert [path for path in (shoal_home / "gguf").iterdir() if path.is_dir()] == []


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        resolve(tmp_path / "notes.txt")


def test_too_little_disk_space_is_said_before_converting(
    tmp_path: Path,
    shoal_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_llama: Callable[..., Any],
    make_gguf: Callable[..., Path],
) -> None:
    path = make_gguf(tmp_path / "m.gguf", make_llama())
    monkeypatch.setattr(source, "_free_bytes", lambda folder: 10)
    with pytest.raises(UsageError, match="SHOAL_HOME"):
        resolve(path, progress=False)


def test_the_room_offers_home_and_check_supported(shoal_home: Path) -> None:
    assert home() == shoal_home
    check_supported({})
