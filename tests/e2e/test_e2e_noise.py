"""Sampled tokens depend on seed, branch and position: not on ranks, batch, order or preemption."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal import LLM, SamplingParams
from shoal.engine.outputs import RequestOutput
from support import families

pytestmark = pytest.mark.usefixtures("thread_ranks")

PROMPTS = families.prompts(32, seed=5)
Tokens = list[list[list[int]]]  # by prompt, by branch


def params(index: int) -> SamplingParams:
    """Everything that noise must not be disturbed by, different for each prompt."""
    return SamplingParams(
        temperature=1.0,
        seed=1000 + index,
        max_tokens=10,
        ignore_eos=True,
        n=2 if index % 4 == 0 else 1,
        top_k=40 if index % 3 == 0 else 0,
        top_p=0.9 if index % 5 == 0 else 1.0,
        min_p=0.02 if index % 7 == 0 else 0.0,
        repetition_penalty=1.2 if index % 2 == 0 else 1.0,
        presence_penalty=0.5 if index % 3 == 1 else 0.0,
        frequency_penalty=0.3 if index % 3 == 2 else 0.0,
        logprobs=3 if index % 2 else None,
        logit_bias={7: 2.0} if index % 6 == 0 else None,
        min_tokens=3 if index % 5 == 1 else 0,
    )


PARAMS = [params(index) for index in range(len(PROMPTS))]


def engine(folder: Path, family: str = "llama_9_3", **options: Any) -> LLM:
    options = {"block_size": 4, "kv_cache_memory_bytes": 1 << 22, **options}
    return LLM(str(families.save(family, folder)), **options)


def tokens(outputs: Sequence[RequestOutput]) -> Tokens:
    return [[branch.token_ids for branch in output.outputs] for output in outputs]


@pytest.fixture
def alone(families_path: Path) -> Tokens:
    """Each request by itself, at one rank, in one process."""
    with engine(families_path) as llm:
        return [tokens(llm.generate([p], s))[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_batch_in_any_order_gives_what_each_request_gives_alone(
    tp: int, ahead: bool, alone: Tokens, families_path: Path
) -> None:
    order = list(range(len(PROMPTS)))
    random.Random(tp).shuffle(order)
    options = {"tensor_parallel_size": tp, "async_scheduling": ahead, "max_num_batched_tokens": 64}
    with engine(families_path, **options) as llm:
        got = tokens(llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order]))
    assert got == [alone[i] for i in order]
    distinct = {token for request in alone for branch in request for token in branch}
    assert len(distinct) > 50, "the tokens vary, so that equality means something"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_preemption_changes_nothing(tp: int, ahead: bool, alone: Tokens, families_path: Path) -> None:
    options = {"tensor_parallel_size": tp, "async_scheduling": ahead, "num_gpu_blocks_override": 30}
    with engine(families_path, **options) as llm:
        got = tokens(llm.generate(PROMPTS, PARAMS))
        assert llm.stats().preemptions_total > 0
    assert got == alone


def test_prefix_caching_changes_nothing(alone: Tokens, families_path: Path) -> None:
    with engine(families_path, enable_prefix_caching=True) as llm:
        first, second = (tokens(llm.generate(PROMPTS, PARAMS)) for _ in range(2))
        assert llm.stats().prefix_cache_hits_total > 0
    assert first == alone
    assert second == alone


def test_branches_differ_and_share_the_prompt(families_path: Path) -> None:
    with engine(families_path, enable_prefix_caching=False) as llm:
        prompt = PROMPTS[0] * 3
        out = llm.generate([prompt], SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True))[0]
        assert len({tuple(branch.token_ids) for branch in out.outputs}) == 4
        single = llm.generate([prompt], SamplingParams(seed=1, max_tokens=10, ignore_eos=True))[0]
        assert single.outputs[0].token_ids == out.outputs[0].token_ids, "branch 0 is the request with n=1"


def test_logprobs_are_of_the_raw_logits_and_the_same_at_two_ranks(families_path: Path) -> None:
    seen = []
    for tp in (1, 2):
        with engine(families_path, tensor_parallel_size=tp) as llm:
            seen.append(llm.generate([PROMPTS[1]], PARAMS[1])[0].outputs[0])
    one, two = seen
    assert one.logprobs is not None and two.logprobs is not None
    for token, here, there in zip(one.token_ids, one.logprobs, two.logprobs, strict=True):
        assert next(iter(here)) == token, "the chosen token comes first"
        assert 3 <= len(here) <= 4
        assert list(here) == list(there)
        for candidate, entry in here.items():
            assert entry.logprob == pytest.approx(there[candidate].logprob, abs=1e-3)


def test_unseeded_requests_differ_between_replicas_and_agree_between_runs(families_path: Path) -> None:
    unseeded = SamplingParams(max_tokens=10, ignore_eos=True)

    def run(**options: Any) -> Tokens:
        with engine(families_path, **options) as llm:
            return tokens(llm.generate(PROMPTS[:4], unseeded))

    first = run(replica_index=0)
    assert first == run(replica_index=0, tensor_parallel_size=2)
    assert all(a != b for a, b in zip(first, run(replica_index=1), strict=True))
    assert all(a != b for a, b in zip(first, run(seed=1), strict=True))
    with engine(families_path) as llm:
        twice = tokens(llm.generate([PROMPTS[0], PROMPTS[0]], unseeded))
    assert twice[0] != twice[1], "two requests without a seed draw different ones"
