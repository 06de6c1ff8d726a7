"""What weights in fewer bits cost: perplexity on problems told in words, against the whole weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.attention.cpu import CpuPaged
from shoal.comm.local import LocalComm
from shoal.jit.team import Team
from shoal.model.choose import serve_causal
from shoal.model.fused import FusedCausal

pytestmark = pytest.mark.demo

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


@torch.inference_mode()
def perplexity(path: Path, storage: str, kernel: CpuPaged, texts: list[torch.Tensor]) -> float:
    """Of the demo model with its weights held so."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chosen = serve_causal(
        module,
        kernel,
        torch.device("cpu"),
        lambda model, paged: FusedCausal(model, paged, kernel, LocalComm(), storage),
    )
    assert chosen.notes[-1] == "served the fused way"
    total, count = 0.0, 0
    for ids in texts:
        logits = chosen.model.plain(ids, torch.arange(len(ids) - 1))
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)


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
