"""Decoders that keep a state, or nothing, give transformers' own greedy tokens: many at once, of all lengths,
in chunks, at several rank counts, with a pool so small that somebody is preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import seq2seq
from support.equality import assert_same_tokens
from support.threads import ranks_as_threads
from support.zoo.build import build
from support.zoo.catalogue import LISTED, UNLISTED, family_of
from support.zoo.serve import (
    TIGHT,
    UNCACHED,
    WHOLE,
    aligned,
    greedy,
    options_of,
    prompts,
    ranks_of,
    save,
    serve,
)

TOKENS = 8

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
    family = aligned(family_of(name))
    options = UNCACHED.get(name, {})
    asked = prompts()
    expected = [greedy(family, prompt, TOKENS, **options) for prompt in asked]
    path = save(family, folder)
    further = options_of(family, tp)

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


@pytest.mark.parametrize(("name", "tp"), SOME)
def test_tokens_equal_transformers(name: str, tp: int, tmp_path: Path) -> None:
    with ranks_of(family_of(name), tp):
        hold(name, tp, tmp_path, [TIGHT])


def test_where_a_pass_over_several_tokens_is_not_what_generate_computes_they_go_one_by_one(
    tmp_path: Path,
) -> None:
    """ProphetNet's streams see how many tokens a call has; generate gives it one at a time."""
    family = family_of("prophetnet")
    model, asked = build(family, "eager", torch.float32), prompts()
    expected = [seq2seq.answers(model, prompt, TOKENS)[0] for prompt in asked]
    with ranks_as_threads():
        served = serve(save(family, tmp_path), asked, TOKENS, 2, max_num_batched_tokens=64)
    assert (served.info.way, served.tokens) == ("seq2seq", expected)


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", ALL)
def test_every_family_at_every_rank_count(name: str, tp: int, tmp_path: Path) -> None:
    with ranks_of(family_of(name), tp):
        hold(name, tp, tmp_path, [WHOLE, TIGHT])
