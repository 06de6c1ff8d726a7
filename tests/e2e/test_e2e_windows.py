"""Layers that see a sliding window keep that window's blocks alone, and give transformers' own tokens:
prompts and outputs longer than the window, in chunks, out of the prefix cache, in branches, with pools so
small that somebody is preempted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal import LLM, SamplingParams
from shoal.config import make_config
from shoal.engine.core import EngineCore
from shoal.engine.launch import launch
from support import families
from support.equality import assert_same_tokens
from support.searches import SearchCase, assert_same_search
from support.zoo.build import build
from support.zoo.catalogue import family_of
from support.zoo.family import Family
from support.zoo.serve import greedy, prompts, save

BLOCK, TOKENS = 4, 14
LAYERS = 3
MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},  # no layer sees all
    "gemma2": {"sliding_window": 6, "layer_types": MIXED},
    "gemma3_text": {"sliding_window": 8, "layer_types": MIXED},
    # Experts as engines compute them, by torch's grouped products, have rows of whole 16 bytes.
    "gpt_oss": {"sliding_window": 7, "layer_types": MIXED, "intermediate_size": 96},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
}
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 16}
ROOMY: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 16}
SEARCHES = [
    SearchCase(12, list(range(3, 101, 7)), num_beams=4, num_return_sequences=4, early_stopping=True),
    SearchCase(12, [7, 50], num_beams=3, num_return_sequences=2, length_penalty=2.0),
]
FULL = pytest.mark.full
TORCH: dict[str, Any] = {"cpu_kernels": "off", "attn_implementation": "sdpa"}


def family(name: str) -> Family:
    known = family_of(name)
    return replace(
        known,
        name=f"{name} windows",
        settings={**known.settings, "num_hidden_layers": LAYERS, **SETTINGS[name]},
    )


def options(**further: Any) -> dict[str, Any]:
    return {
        "block_size": BLOCK,
        "max_model_len": 60,
        "max_num_seqs": 6,
        "kv_cache_memory_bytes": 1 << 25,
        **further,
    }


def hold(name: str, tp: int, folder: Path, further: dict[str, Any]) -> None:
    """The family through an engine three times over: all prompts, again out of the prefix cache, and once
    more with two branches each."""
    subject, asked = family(name), prompts(lengths=(1, 2, 3, 4, 5, 9, 23, 38, 17, 30))
    expected = [greedy(subject, prompt, TOKENS) for prompt in asked]
    path = save(subject, folder)

    @torch.no_grad()
    def scores(ids: list[int]) -> torch.Tensor:
        return build(subject, "eager", torch.float32)(torch.tensor([ids])).logits[0, -1]

    with LLM(str(path), tensor_parallel_size=tp, **options(**further)) as llm:
        core = llm._generator()
        assert llm.info.way == "fused" or "cpu_kernels" in further
        assert llm.info.window == SETTINGS[name]["sliding_window"] and llm.info.num_window_blocks > 0

        def run(wanted: list[list[int]], count: int, n: int = 1) -> list[list[int]]:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, n=n)
            found = llm.generate(wanted, params)
            core.check_integrity()
            assert llm.stats().kv_cache_usage == llm.stats().kv_cache_window_usage == 0
            return [branch.token_ids for output in found for branch in output.outputs]

        def resume(prompt: list[int], count: int) -> list[int]:
            return run([prompt], count)[0]

        assert_same_tokens(asked, expected, run(asked, TOKENS), resume, scores)
        before = llm.stats()
        assert_same_tokens(asked, expected, run(asked, TOKENS), resume, scores)
        if "num_gpu_blocks_override" in further:
            assert before.preemptions_total > 0
        else:
            assert llm.stats().prefix_cache_hits_total > before.prefix_cache_hits_total + 80
        twice = [prompt for prompt in asked for _ in range(2)]
        wanted = [ids for ids in expected for _ in range(2)]
        assert_same_tokens(twice, wanted, run(asked, TOKENS, n=2), resume, scores)


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize(
    ("name", "tp", "further"),
    [
        ("mistral", 1, TIGHT),
        ("gemma2", 2, TIGHT),
        ("gemma3_text", 1, ROOMY),
        ("gpt_oss", 1, TIGHT),
        ("qwen2", 2, {**TORCH, **ROOMY}),
    ],
)
def test_tokens_equal_transformers(name: str, tp: int, further: dict[str, Any], tmp_path: Path) -> None:
    hold(name, tp, tmp_path, further)


@pytest.mark.full
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("further", [TIGHT, ROOMY, {**TORCH, **TIGHT}])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_family_at_every_rank_count(
    name: str, tp: int, further: dict[str, Any], tmp_path: Path
) -> None:
    hold(name, tp, tmp_path, further)


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize(
    ("tp", "caching"), [(1, False), pytest.param(1, True, marks=FULL), pytest.param(2, False, marks=FULL)]
)
def test_beams_go_on_from_what_a_window_has_left(tp: int, caching: bool, families_path: Path) -> None:
    """No layer of this family sees more than 12 positions."""
    path = families.save("mistral", families_path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    asked = prompts(lengths=[1, 11, 23])
    more = {"enable_prefix_caching": caching, "num_gpu_blocks_override": 60}
    with LLM(str(path), tensor_parallel_size=tp, **options(max_num_batched_tokens=16, **more)) as llm:
        assert llm.info.window == 12
        for search in SEARCHES:
            for prompt, output in zip(asked, llm.generate(asked, search.params()), strict=True):
                assert_same_search(search, model, prompt, output)
        llm._generator().check_integrity()


def test_on_the_padded_way_all_layers_keep_all_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject, asked = family("mistral"), prompts(lengths=[3, 20])
    with caplog.at_level("INFO", "shoal.engine"):
        llm = LLM(str(save(subject, tmp_path)), **options(way="padded"))
    with llm:
        assert (llm.info.way, llm.info.window, llm.info.num_window_blocks) == ("padded", 0, 0)
        found = llm.generate(asked, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in found] == [greedy(subject, ids, 8) for ids in asked]
    assert "layers that see a window keep all positions" in caplog.text


def used_blocks(core: EngineCore) -> int:
    return round(core.stats().kv_cache_window_usage * core.info.num_window_blocks)


def test_at_8000_tokens_a_window_takes_no_more_blocks_than_it_needs(tmp_path: Path) -> None:
    """A gemma-like model, two requests at once, in memory that would not hold one of them whole.
    Chunks of a prompt take theirs on top for as long as they are computed.
    """
    memory, window, chunk, block, count = 8 << 20, 128, 512, 16, 6
    known = family_of("gemma3_text")
    layers = {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
    sizes = {"sliding_window": window, "max_position_embeddings": 8192}
    subject = replace(known, name="long", settings={**known.settings, **layers, **sizes})
    [prompt] = prompts(lengths=[8000 - count])
    model: Any = build(subject, "sdpa", torch.float32)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    core = launch(
        make_config(
            model=str(save(subject, tmp_path)),
            block_size=block,
            max_num_seqs=2,
            max_num_batched_tokens=chunk,
            kv_cache_memory_bytes=memory,
        )
    )
    assert isinstance(core, EngineCore)
    try:
        for name in "ab":
            core.submit(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        most = {"prefill": 0, "decode": 0}
        needed = -(-window // block) + 1
        [rank] = core.info.ranks
        assert rank["kv_bytes"] <= memory < len(prompt) * rank["kv_bytes_per_token"]
        while core.has_work:
            is_decoding = all(tokens.values())
            for delta in core.step():
                tokens[delta.request_id] += delta.outputs[0].token_ids
            kind = "decode" if is_decoding else "prefill"
            most[kind] = max(most[kind], used_blocks(core))
            core.check_integrity()
        assert core.stats().preemptions_total == 0
        assert 0 < most["decode"] <= 2 * needed
        assert most["prefill"] <= 2 * needed + chunk // block
        assert tokens["a"] == tokens["b"] == expected[0, len(prompt) :].tolist()
    finally:
        core.shutdown()
