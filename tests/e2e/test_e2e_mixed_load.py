"""Requests of every kind and length at once, in a pool so small that some are preempted, get what they get
alone in a roomy one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal import LLM, SamplingParams
from shoal.engine.outputs import RequestOutput
from support import families, seq2seq
from support.zoo.family import VOCABULARY
from support.zoo.seq2seq import SEQ2SEQ

BLOCK = 4
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 90]
ENCODER_LENGTHS = [300, 1, BLOCK, 2, 150, BLOCK + 1, 37]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5, "n": 2, "top_k": 20},
    {"temperature": 0.0, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "logprobs": 2},
    {"num_beams": 3, "n": 2, "logprobs": 0},
    {"temperature": 0.8, "seed": 9, "min_tokens": 3, "stop_token_ids": list(range(3, VOCABULARY, 5))},
]
TOKENS = 12

pytestmark = pytest.mark.usefixtures("thread_ranks")


def requests(lengths: list[int]) -> list[tuple[list[int], SamplingParams]]:
    """Every length with several kinds, kinds and lengths in turn."""
    prompts = seq2seq.prompts(lengths * 2, seed=4)
    fields = [KINDS[number % len(KINDS)] for number in range(len(prompts))]
    return [
        (prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **own))
        for prompt, own in zip(prompts, fields, strict=True)
    ]


def told(output: RequestOutput) -> list[tuple[list[int], str | None]]:
    return [(branch.token_ids, branch.finish_reason) for branch in output.outputs]


def hold(path: Path, tp: int, asked: list[tuple[list[int], SamplingParams]], **tight: Any) -> None:
    def open_engine(**options: Any) -> LLM:
        return LLM(str(path), tensor_parallel_size=tp, block_size=BLOCK, **options)

    with open_engine(num_gpu_blocks_override=600, max_num_batched_tokens=512) as llm:
        alone = [told(llm.generate([prompt], params)[0]) for prompt, params in asked]
        assert llm.stats().preemptions_total == 0
    prompts, params = zip(*asked, strict=True)
    with open_engine(**tight) as llm:
        together = llm.generate(list(prompts), list(params))
        assert llm.stats().preemptions_total > 0
        assert llm.stats().kv_cache_usage == 0
    for (prompt, own), expected, output in zip(asked, alone, together, strict=True):
        assert told(output) == expected, (len(prompt), own)


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("llama", 2),  # paged
        ("bloom", 1),  # padded
        pytest.param("llama", 1, marks=pytest.mark.full),
        pytest.param("bloom", 2, marks=pytest.mark.full),
        pytest.param("gpt_neox", 3, marks=pytest.mark.full),
        pytest.param("mistral", 2, marks=pytest.mark.full),  # sees a window
    ],
)
def test_decoders_under_mixed_load(family: str, tp: int, families_path: Path) -> None:
    path = families.save(family, families_path)
    hold(path, tp, requests(LENGTHS), num_gpu_blocks_override=44, max_num_batched_tokens=24)


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("t5", 2),
        pytest.param("t5", 1, marks=pytest.mark.full),
        pytest.param("marian", 2, marks=pytest.mark.full),
        pytest.param("led", 1, marks=pytest.mark.full),
    ],
)
def test_encoder_decoders_under_mixed_load(family: str, tp: int, families_path: Path) -> None:
    assert family in SEQ2SEQ
    path = seq2seq.save(family, families_path)
    config = json.loads((path / "config.json").read_text())
    longest = config.get("max_encoder_position_embeddings", config.get("max_position_embeddings", 300))
    lengths = [min(length, longest) for length in ENCODER_LENGTHS]
    hold(path, tp, requests(lengths), num_gpu_blocks_override=84, max_num_batched_tokens=320)
