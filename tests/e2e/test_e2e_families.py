"""Every tiny family gives transformers' own greedy tokens at every rank count, however the batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import LLM, SamplingParams
from support import families
from support.equality import assert_same_tokens

TOKENS = 12
# (tokens a step, prefix caching, KV blocks): whole prompts; small chunks; chunks in a cache that overflows
CUTS: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 512, "enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 16, "enable_prefix_caching": True},
    "tight": {"max_num_batched_tokens": 24, "enable_prefix_caching": True, "num_gpu_blocks_override": 22},
}


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("family", sorted(families.CONFIGS))
def test_tokens_equal_transformers(family: str, tp: int, families_path: Path) -> None:
    model = families.build(family)
    prompts = families.prompts(12, seed=3)
    prompts.append(prompts[0][:20] + prompts[1])  # something for the prefix cache to find
    prompts.append(prompts[-1] + [7])
    expected = [families.reference(model, prompt, TOKENS) for prompt in prompts]

    @torch.no_grad()
    def scores(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0, -1]

    for cut, options in CUTS.items():
        with LLM(
            str(families.save(family, families_path)),
            tensor_parallel_size=tp,
            block_size=4,
            kv_cache_memory_bytes=1 << 22,
            **options,
        ) as llm:

            def run(prompt: list[int], count: int, llm: LLM = llm) -> list[int]:
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                return llm.generate([prompt], params)[0].outputs[0].token_ids

            params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
            got = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
            assert_same_tokens(prompts, expected, got, run, scores)
            stats = llm.stats()
        assert (stats.preemptions_total > 0) == (cut == "tight")
        assert (stats.prefix_cache_hits_total > 0) == options["enable_prefix_caching"]
