"""What weights in fewer bits cost: perplexity on problems told in words, against the whole weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.attention.cpu import CpuPaged
from shoal.bench.perplexity import perplexity
from shoal.jit.team import Team

pytestmark = [pytest.mark.demo, pytest.mark.slow]

DATA = Path(__file__).parent.parent / "data" / "gsm8k-test-128.jsonl"
NUM_TEXTS = 12


@pytest.fixture(scope="module")
def kernel() -> Iterator[CpuPaged]:
    team = Team(1)
    yield CpuPaged(team)
    team.close()


@pytest.fixture(scope="module")
def texts(demo_path: Path) -> list[torch.Tensor]:
    """Token ids of questions with their answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_path)
    lines = [json.loads(line) for line in DATA.read_text().splitlines()[:NUM_TEXTS]]
    return [torch.tensor(tokenizer(f"{line['question']}\n{line['answer']}").input_ids) for line in lines]


@pytest.fixture(scope="module")
def whole(demo_path: Path, kernel: CpuPaged, texts: list[torch.Tensor]) -> float:
    return perplexity(demo_path, "float32", kernel, texts)


@pytest.mark.parametrize(("storage", "most"), [("int8", 1.01), ("int4", 1.04)])
def test_perplexity_stays_within_a_few_percent(
    storage: str, most: float, whole: float, demo_path: Path, kernel: CpuPaged, texts: list[torch.Tensor]
) -> None:
    rounded = perplexity(demo_path, storage, kernel, texts)
    print(f"{storage}: {rounded:.4f}, whole: {whole:.4f}, ratio {rounded / whole:.5f}")
    assert 1 / most < rounded / whole < most
    assert rounded != whole
