"""Too few KV blocks, names used twice, and branches that end before their siblings: each has the answer it
would have had alone, or a refusal that says what would fit; afterwards the books agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import shoal.worker.sampled_apart as sampled_apart
from shoal import LLM, AsyncLLM, SamplingParams
from shoal.engine.outputs import CompletionOutput, RequestOutput
from shoal.errors import RequestError
from shoal.messages import SequenceStep, TokenResult
from shoal.server.app import create_app
from shoal.server.settings import ServerSettings
from support import families

pytestmark = pytest.mark.usefixtures("thread_ranks")

NUM_BLOCKS, BLOCK_SIZE = 10, 4
PROMPTS = families.prompts(5, seed=9)
AT_RATE = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def engine(folder: Path, **options: Any) -> LLM:
    options = {"block_size": BLOCK_SIZE, "kv_cache_memory_bytes": 1 << 22, **options}
    return LLM(str(families.save("llama_9_3", folder)), **options)


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(branch.token_ids) for output in outputs for branch in output.outputs]


def are_books_closed(llm: LLM) -> bool:
    """Every block is free, and blocks, prefixes, queue and texts agree."""
    core = llm._core
    assert core is not None
    core.check_integrity()
    stats = llm.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)


@pytest.fixture(scope="module")
def roomy(families_path: Path) -> Iterator[LLM]:
    with engine(families_path) as llm:
        yield llm


@pytest.fixture(params=[1, 2])
def tight(request: pytest.FixtureRequest, families_path: Path) -> Iterator[LLM]:
    """Ten blocks, 40 tokens; the model could take 256."""
    options = {"tensor_parallel_size": request.param, "num_gpu_blocks_override": NUM_BLOCKS}
    with engine(families_path, **options) as llm:
        assert llm.info.num_blocks == NUM_BLOCKS
        yield llm
        assert are_books_closed(llm)


def test_two_long_requests_take_turns_in_ten_blocks(roomy: LLM, tight: LLM) -> None:
    prompts = [prompt[:6] for prompt in PROMPTS[:2]]
    assert ids(tight.generate(prompts, greedy(30))) == ids(roomy.generate(prompts, greedy(30)))
    assert tight.stats().preemptions_total > 0, "36 tokens each are nine blocks each"


def test_five_that_together_do_not_fit_are_all_served(roomy: LLM, tight: LLM) -> None:
    prompts = [(prompt * 8)[: 8 + index] for index, prompt in enumerate(PROMPTS)]
    assert ids(tight.generate(prompts, greedy(12))) == ids(roomy.generate(prompts, greedy(12)))


def test_what_the_model_could_take_and_the_blocks_cannot_is_refused_with_what_would_fit(tight: LLM) -> None:
    long = (PROMPTS[0] * 60)[: NUM_BLOCKS * BLOCK_SIZE + 1]
    with pytest.raises(RequestError, match=r"\b40\b"):
        tight.generate([long], greedy(4))
    whole = tight.generate([long[: NUM_BLOCKS * BLOCK_SIZE - 4]], greedy(4))
    assert len(whole[0].outputs[0].token_ids) == 4, "the next one that does fit is served"


def branch_that_ends_alone(branches: Sequence[CompletionOutput]) -> tuple[int, int]:
    """A token that one branch says in its middle and no other at all; and whose it is."""
    for index, branch in enumerate(branches):
        others = {token for other in branches if other is not branch for token in other.token_ids}
        for token in branch.token_ids[2:-2]:
            if token not in others:
                return token, index
    raise AssertionError("the branches say the same")


def test_a_branch_that_stops_leaves_its_siblings_what_they_were(roomy: LLM) -> None:
    whole = roomy.generate([PROMPTS[0]], AT_RATE)[0].outputs
    token, ended = branch_that_ends_alone(whole)
    params = SamplingParams(
        n=4, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, stop_token_ids=[token]
    )
    got = roomy.generate([PROMPTS[0]], params)[0].outputs
    for index, (have, want) in enumerate(zip(got, whole, strict=True)):
        if index == ended:
            assert (have.finish_reason, have.stop_reason) == ("stop", token)
            assert len(have.token_ids) < len(want.token_ids)
        else:
            assert (have.finish_reason, have.token_ids) == ("length", want.token_ids)
    assert are_books_closed(roomy)


@pytest.fixture
def broken_branch(monkeypatch: pytest.MonkeyPatch) -> int:
    """The branch whose sampling raises from its fifth token on."""
    sample = sampled_apart.sample

    def failing(logits: Any, sequences: Sequence[SequenceStep]) -> tuple[TokenResult, ...]:
        for sequence in sequences:
            if sequence.sampling is not None and sequence.sampling.branch == 2 and sequence.num_output >= 4:
                raise RuntimeError("this one cannot be sampled")
        return sample(logits, sequences)

    monkeypatch.setattr(sampled_apart, "sample", failing)
    return 2


def test_a_branch_that_is_given_up_leaves_its_siblings_what_they_were(
    request: pytest.FixtureRequest, roomy: LLM
) -> None:
    whole = roomy.generate([PROMPTS[0]], AT_RATE)[0].outputs
    broken = request.getfixturevalue("broken_branch")
    got = roomy.generate([PROMPTS[0]], AT_RATE)[0].outputs
    assert [branch.finish_reason for branch in got] == ["length", "length", "error", "length"]
    for index, (have, want) in enumerate(zip(got, whole, strict=True)):
        assert have.token_ids == (want.token_ids[:4] if index == broken else want.token_ids)
    assert are_books_closed(roomy)


def test_names_and_branches_over_http(families_path: Path, broken_branch: int) -> None:
    """One name twice, aborted and used again; and a branch that is given up, whole and as a stream."""
    folder = families.save_with_words("llama_9_3", families_path)
    ask = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    same = {"X-Request-Id": "same"}

    async def asked() -> None:
        front = await AsyncLLM.start(str(folder), kv_cache_memory_bytes=1 << 22, block_size=BLOCK_SIZE)
        transport = httpx.ASGITransport(create_app(front, ServerSettings(model="m")))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:

            async def post(**further: Any) -> httpx.Response:
                return await client.post("/v1/completions", json={**ask, **further}, headers=same)

            twice = await asyncio.gather(post(), post())
            assert sorted(answer.status_code for answer in twice) == [200, 409]
            alone = next(answer for answer in twice if answer.status_code == 200).json()["choices"]
            leaving = asyncio.ensure_future(post(max_tokens=60))
            while not front.stats().num_running:
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            while (again := await post()).status_code == 409:  # until the abort has been heard
                await asyncio.sleep(0)
            assert again.json()["choices"] == alone
            branches = (await post(n=4, temperature=1, seed=3)).json()["choices"]
            reasons = [choice["finish_reason"] for choice in branches]
            assert reasons == ["error" if index == broken_branch else "length" for index in range(4)]
        stats = front.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
        await front.shutdown()

    asyncio.run(asked())
