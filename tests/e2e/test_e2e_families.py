"""Every tiny family gives transformers' own greedy tokens at every rank count, however the batch is cut.
So does every family of the zoo; the fast suite runs a sample of them, drawn by a seed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shoal import LLM, SamplingParams
from support import families
from support.equality import assert_same_tokens
from support.families_page import SERVED_RANKS
from support.zoo.catalogue import CLASSIFIERS, LISTED, UNLISTED, family_of
from support.zoo.trial import measure_service

TOKENS = 12
# (tokens a step, prefix caching, KV blocks): whole prompts; small chunks; chunks in a cache that overflows
CUTS: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 512, "enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 16, "enable_prefix_caching": True},
    "tight": {"max_num_batched_tokens": 24, "enable_prefix_caching": True, "num_gpu_blocks_override": 22},
}
SEED, SAMPLE = 2026, 12
SOME_CLASSIFIERS = {"bert classifier", "gpt2 classifier:no padding", "plbart classifier"}
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def zoo() -> list[Any]:
    """Every family at a rank count drawn by the seed; some of them are in the fast suite."""
    names = sorted(name for name, family in {**LISTED, **UNLISTED}.items() if family.is_known)
    draw = random.Random(SEED)
    sample = draw.sample(names, SAMPLE)
    return [
        pytest.param(name, draw.choice(SERVED_RANKS), marks=[] if name in sample else [pytest.mark.full])
        for name in names
    ]


@pytest.mark.parametrize(("name", "tp"), zoo())
def test_a_family_of_the_zoo_equals_transformers(name: str, tp: int) -> None:
    service = measure_service(family_of(name), [tp])
    assert service.generated or service.encoded
    assert service.is_right, service


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SOME_CLASSIFIERS else [pytest.mark.full])
        for name, family in CLASSIFIERS.items()
        if family.is_known
    ],
)
def test_a_classifier_of_the_zoo_equals_transformers(name: str) -> None:
    service = measure_service(family_of(name), [2])
    assert service.encoded and service.is_right, service


def test_the_page_has_a_row_for_every_family_and_none_is_wrong() -> None:
    text = PAGE.read_text()
    if f"transformers {transformers.__version__}." not in text:
        pytest.skip("the page is of another version of transformers")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert {row[0].removeprefix("| ") for row in rows} >= {**LISTED, **UNLISTED, **CLASSIFIERS}.keys()
    assert "; 0 are wrong." in text


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
