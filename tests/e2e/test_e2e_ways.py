"""Decoders that keep a state, or nothing, give transformers' own greedy tokens: many at once, of all lengths,
in chunks, at several rank counts, with a pool so small that somebody is preempted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.equality import assert_same_tokens
from support.zoo.build import build
from support.zoo.catalogue import LISTED, UNLISTED, family_of
from support.zoo.serve import TIGHT, WHOLE, greedy, prompts, save, serve

TOKENS = 8

# Of these, generate with a cache computes something else than without: tokens are hashed or masked otherwise.
UNCACHED: dict[str, dict[str, Any]] = {
    "xlnet": {"use_mems": False},
    "reformer": {"use_cache": False},
    "cpmant": {"use_cache": False},
}
# Experts as engines compute them, by torch's grouped products, have rows of whole 16 bytes.
ALIGNED: dict[str, dict[str, Any]] = {
    name: {"intermediate_size": 96} for name in ("minimax", "jamba", "granitemoehybrid")
}
NOTHING = ["openai", "xlm", "flaubert", "xlnet", "reformer", "cpmant"]
STATES = [
    "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "minimax", "qwen3_next",
    "qwen3_5_text", "bamba", "falcon_h1", "jamba", "lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h",
    "olmo_hybrid", "zamba", "zamba2", "zaya", "kimi_linear", "yuan",
]  # fmt: skip
ALL = [name for name in (*NOTHING, *STATES) if (LISTED | UNLISTED)[name].is_known]
SOME = [
    ("openai", 2), ("xlm", 3), ("xlnet", 1), ("reformer", 1), ("mamba", 2), ("rwkv", 1), ("xlstm", 1),
    ("recurrent_gemma", 2), ("minimax", 1), ("qwen3_next", 2), ("yuan", 1),
]  # fmt: skip


def hold(name: str, tp: int, folder: Path, cuts: list[dict[str, Any]]) -> None:
    family = family_of(name)
    family = replace(family, settings={**family.settings, **ALIGNED.get(name, {})})
    options = UNCACHED.get(name, {})
    asked = prompts()
    expected = [greedy(family, prompt, TOKENS, **options) for prompt in asked]
    path = save(family, folder)
    further = {"trust_remote_code": True} if family.is_custom else {}

    def resume(prompt: list[int], count: int) -> list[int]:
        return serve(path, [prompt], count, tp, **further).tokens[0]

    @torch.no_grad()
    def scores(ids: list[int]) -> torch.Tensor:
        return build(family, "eager", torch.float32)(torch.tensor([ids])).logits[0, -1]

    for cut in cuts:
        served = serve(path, asked, TOKENS, tp, **cut, **further)
        assert_same_tokens(asked, expected, served.tokens, resume, scores)
        assert served.info.way == ("recompute" if name in NOTHING else "state")
        assert (served.info.num_slots > 0) == (name in STATES)
        assert served.stats.prefix_cache_hits_total == 0
        if name in STATES:
            assert (served.stats.preemptions_total > 0) == (cut is TIGHT)
        assert all(rank["kv_bytes"] == 0 for rank in served.info.ranks) == (name in NOTHING)


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize(("name", "tp"), SOME)
def test_tokens_equal_transformers(name: str, tp: int, tmp_path: Path) -> None:
    hold(name, tp, tmp_path, [TIGHT])


@pytest.mark.full
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize(
    # Reformer seeds torch anew in every layer: ranks that are threads would mix their hashes up.
    ("name", "tp"),
    [(name, tp) for name in ALL for tp in (1, 2, 3) if name != "reformer" or tp == 1],
)
def test_every_family_at_every_rank_count(name: str, tp: int, tmp_path: Path) -> None:
    hold(name, tp, tmp_path, [WHOLE, TIGHT])
