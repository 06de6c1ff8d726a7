"""The demo model over real rank processes: transformers' own tokens, and memory as it was planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import LLM, SamplingParams
from support.equality import Scores, assert_same_tokens

pytestmark = pytest.mark.demo

CHUNKS = {"max_num_batched_tokens": 192}
# 75 blocks of 16 hold three of the longer requests: the rest is preempted and recomputed
TIGHT = {"num_gpu_blocks_override": 75}
ROOMY = {"kv_cache_memory_bytes": 600 << 20}


@pytest.fixture(scope="module")
def scores(demo_path: Path) -> Scores:
    """transformers' logits of the next token; the model is loaded only if something differs."""
    from transformers import AutoModelForCausalLM

    model: Any = None

    @torch.no_grad()
    def row(ids: list[int]) -> torch.Tensor:
        nonlocal model
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float32).eval()
        return model(torch.tensor([ids])).logits[0, -1]

    return row


def check(llm: LLM, prompts: list[dict[str, Any]], scores: Scores) -> None:
    """Hold the engine against the reference, all prompts at once."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    ids = [prompt["ids"] for prompt in prompts]
    got = [out.outputs[0].token_ids for out in llm.generate(ids, params)]

    def resume(prompt: list[int], count: int) -> list[int]:
        more = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return llm.generate([prompt], more)[0].outputs[0].token_ids

    assert_same_tokens(ids, [prompt["expected"] for prompt in prompts], got, resume, scores)


@pytest.mark.usefixtures("demo_path")
def test_one_rank_in_chunks_with_prefix_caching(workload: list[dict[str, Any]], scores: Scores) -> None:
    with LLM("demo", **CHUNKS, **ROOMY) as llm:
        check(llm, workload, scores)
        assert llm.stats().preemptions_total == 0


@pytest.mark.usefixtures("demo_path")
def test_two_ranks_in_a_tight_cache_and_memory_as_planned(
    workload: list[dict[str, Any]], scores: Scores
) -> None:
    """Two ranks, a step ahead, chunks, no prefix cache, preemption; then what they hold against the plan."""
    options = {"tensor_parallel_size": 2, "enable_prefix_caching": False, "async_scheduling": True}
    with LLM("demo", **options, **CHUNKS, **TIGHT) as llm:
        check(llm, workload, scores)
        assert llm.stats().preemptions_total > 0
        ranks = llm.info.ranks
    command = [sys.executable, "-m", "shoal", "plan", "demo", "-tp", "2", "--json"]
    planned = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    for rank, plan in zip(ranks, planned["ranks"], strict=True):
        assert rank["weight_bytes"] == plan["weight_bytes"]
        assert rank["kv_bytes_per_token"] == plan["kv_bytes_per_token"]
        # What the process really grew by, from before loading to after the first step, less its KV pages.
        assert rank["private_growth_bytes"] == pytest.approx(rank["weight_bytes"], rel=0.10)
        assert rank["bytes_read"] < 0.7 * 538_060_032
    weights = [rank["weight_bytes"] for rank in ranks]
    assert max(weights) / min(weights) < 1.02, "uneven heads are made up for in the MLP"


@pytest.mark.slow
@pytest.mark.usefixtures("demo_path")
def test_one_rank_on_torch_alone(workload: list[dict[str, Any]], scores: Scores) -> None:
    with LLM("demo", cpu_kernels="off", **CHUNKS, **ROOMY) as llm:
        check(llm, workload[::4], scores)


@pytest.mark.slow
@pytest.mark.usefixtures("demo_path")
def test_three_ranks_on_a_third_of_the_workload(workload: list[dict[str, Any]], scores: Scores) -> None:
    with LLM("demo", tensor_parallel_size=3, **CHUNKS, **ROOMY) as llm:
        check(llm, workload[::3], scores)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("demo_path")
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("cache", ["roomy", "tight"])
def test_the_whole_grid(
    tp: int, prefix_caching: bool, cache: str, workload: list[dict[str, Any]], scores: Scores
) -> None:
    memory = ROOMY if cache == "roomy" else TIGHT
    with LLM(
        "demo", tensor_parallel_size=tp, enable_prefix_caching=prefix_caching, **CHUNKS, **memory
    ) as llm:
        check(llm, workload, scores)
        assert (llm.stats().preemptions_total > 0) == (cache == "tight")
