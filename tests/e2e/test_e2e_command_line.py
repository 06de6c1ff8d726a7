"""``shoal generate`` and its refusals, as a user meets them: output, messages, exit statuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import families


def shoal(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=240)


@pytest.fixture
def tiny(families_path: Path) -> Path:
    return families.save("llama_9_3", families_path)


@pytest.fixture
def damaged(tiny: Path, tmp_path: Path) -> Path:
    """A copy of a model that a test may break."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.mark.demo
def test_prompts_by_file_come_back_as_jsonl_in_order(demo_path: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "The sky is"}\n{"prompt": "Two and two make"}\n')
    done = shoal(
        "generate", "demo", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"),
        "--max-tokens", "6", "--temperature", "0", "--kv-cache-memory-bytes", str(64 << 20),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert [line["prompt"] for line in lines] == ["The sky is", "Two and two make"]
    for line in lines:
        assert set(line) == {
            "index", "prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens",
        }  # fmt: skip
        assert line["completion_tokens"] == len(line["token_ids"])


@pytest.mark.demo
def test_a_chat_from_stdin_answers_in_text(demo_path: Path) -> None:
    done = shoal(
        "generate", "demo", "--chat", "--max-tokens", "12", "--temperature", "0",
        "--kv-cache-memory-bytes", str(64 << 20), stdin="What is the capital of France?",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such-model", "-p", "x"], "no/such-model"),
        (["{tiny}", "-p", ""], "prompt"),
        (["{tiny}", "-p", "x", "--max-tokens", "0"], "max"),
        (["{tiny}", "-p", "x", "--max-tokens", "-1"], "max"),
        (["{tiny}", "-p", "x", "--temperature", "-1"], "temperature"),
        (["{tiny}", "-p", "x", "--top-p", "0"], "top"),
        (["{tiny}", "-p", "x", "--top-p", "1.1"], "top"),
        (["{tiny}", "-p", "x", "--device", "cuda"], "device"),
        (["{tiny}", "-p", "x", "--max-model-len", "100000"], "max_model_len"),
        (["{tiny}", "-p", "x", "--executor", "inline", "-tp", "2"], "executor"),
        (["{tiny}", "-p", "x", "--no-such-flag"], "no-such-flag"),
        (["{tiny}", "--input", "{lines}"], "line 2"),
        (["{tiny}", "--input", "{long}", "--max-model-len", "16"], "prompt"),
        (["{empty}", "-p", "x"], "config.json"),
        (["{weightless}", "-p", "x"], "weights"),
        (["{corrupt}", "--input", "{ids}"], "model.safetensors"),
        (["{corrupt}", "--input", "{ids}", "-tp", "2"], "model.safetensors"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_input_is_exit_status_2_with_a_message_and_no_traceback(
    arguments: list[str], said: str, tiny: Path, damaged: Path, tmp_path: Path
) -> None:
    names = {name: tmp_path / name for name in ("lines", "long", "ids", "empty", "weightless")}
    names["lines"].write_text('{"prompt_token_ids": [5]}\n{"prompt_token_ids": [5}\n')
    names["long"].write_text(json.dumps({"prompt_token_ids": [5] * 40}) + "\n")
    names["ids"].write_text('{"prompt_token_ids": [5, 6]}\n')
    names["empty"].mkdir()
    shutil.copytree(tiny, names["weightless"])
    (names["weightless"] / "model.safetensors").unlink()
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    filled = [a.format(tiny=tiny, corrupt=damaged, **names) for a in arguments]
    done = shoal("generate", *filled)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
