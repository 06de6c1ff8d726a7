"""A real sentence encoder over ranks: the vectors and neighbours that transformers makes, from Python
and from the command line, and nearly those with weights of few bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from shoal import LLM
from shoal.cli.main import main
from support.minilm import minilm_path

pytestmark = [pytest.mark.demo, pytest.mark.usefixtures("thread_ranks")]

QUESTIONS = Path(__file__).parent.parent / "data" / "gsm8k-test-128.jsonl"
LEAST_COSINE = 0.99999


@pytest.fixture(scope="module")
def folder() -> Path:
    return minilm_path()


@pytest.fixture(scope="module")
def questions() -> list[str]:
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[:64]
    return [json.loads(line)["question"] for line in lines]


@pytest.fixture(scope="module")
def expected(folder: Path, questions: list[str]) -> torch.Tensor:
    """By sentence-transformers' recipe for this model: the mean over a text's tokens, normalised."""
    tokenizer = T.AutoTokenizer.from_pretrained(folder)
    model = T.AutoModel.from_pretrained(folder).eval()
    rows = []
    for start in range(0, len(questions), 32):
        encoded = tokenizer(
            questions[start : start + 32], padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = model(**encoded).last_hidden_state
        mask = encoded["attention_mask"][..., None].to(hidden.dtype)
        rows.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(rows)


def vectors(folder: Path, questions: list[str], **options: Any) -> torch.Tensor:
    with LLM(str(folder), num_threads=1, **options) as llm:
        assert llm.info.max_model_len == 256, "as the folder's sentence-transformers files say"
        found = llm.embed(questions, truncate_prompt_tokens=-1)
    return torch.tensor([one.outputs.embedding for one in found])


def nearest(rows: torch.Tensor) -> torch.Tensor:
    """Each vector's nearest other one."""
    return (rows @ rows.T).fill_diagonal_(-1).argmax(1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_vectors_and_neighbours_are_transformers(
    ranks: int, folder: Path, questions: list[str], expected: torch.Tensor
) -> None:
    got = vectors(folder, questions, tensor_parallel_size=ranks)
    assert float((got * expected).sum(1).min()) > LEAST_COSINE
    assert torch.equal(nearest(got), nearest(expected))


@pytest.mark.full
@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.99), ("int4", 0.97)])
def test_weights_of_few_bits_turn_vectors_little(
    quantization: str, least: float, folder: Path, questions: list[str], expected: torch.Tensor
) -> None:
    cosines = (vectors(folder, questions, quantization=quantization) * expected).sum(1)
    assert float(cosines.min()) >= least
    assert float(cosines.max()) < 1 - 1e-6, "the weights were not rounded"


def test_the_command_line_reads_and_writes_jsonl(
    folder: Path, questions: list[str], expected: torch.Tensor, tmp_path: Path, logging_restored: None
) -> None:
    lines = [json.dumps({"prompt": question}) for question in questions[:12]]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out.jsonl"
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]
    assert main(["generate", str(folder), "--task", "embed", *files, "--num-threads", "1"]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == questions[:12]
    got = torch.tensor([row["embedding"] for row in rows])
    assert float((got * expected[:12]).sum(1).min()) > LEAST_COSINE
