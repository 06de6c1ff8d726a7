"""Models of published widths get small clones that keep what the plan counts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import transformers as T

from shoal.errors import PlanError
from shoal.plan.settings import integers
from shoal.plan.skeleton import build_on_meta
from shoal.plan.types import Plan, Region, Split, even_ranges
from shoal.prove.clone import find_clone
from shoal.prove.shrink import Structure, candidates, shrink_further, small_vocabulary, structure_of
from support.planner import llama

STRUCTURE = Structure(
    tp=4,
    heads=frozenset({64, 8}),
    head_size=128,
    neurons={28672: 32},
    vocabularies=frozenset({32000}),
    widths=frozenset({8192, 28672}),
)


def llama_70b(**changes: Any) -> Any:
    shape: dict[str, Any] = {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 32000, "num_hidden_layers": 4,
    }  # fmt: skip
    return T.LlamaConfig(**{**shape, **changes})


def test_the_first_candidate_keeps_head_counts_and_shrinks_head_size_neurons_and_vocabulary() -> None:
    small = next(candidates(STRUCTURE, llama_70b()))
    assert (small.num_attention_heads, small.num_key_value_heads) == (64, 8)
    assert (small.hidden_size, small.head_dim, small.intermediate_size) == (1024, 16, 32)
    assert small.vocab_size == small_vocabulary(32000, 4)


def test_the_last_candidate_is_the_config_itself() -> None:
    *_, last = candidates(STRUCTURE, llama_70b())
    assert dict(integers(last)) == dict(integers(llama_70b()))


def test_special_tokens_beyond_the_small_vocabulary_become_0() -> None:
    small = next(candidates(STRUCTURE, llama_70b(eos_token_id=31999)))
    assert small.eos_token_id == 0


def test_other_values_are_divided_only_while_the_model_serves() -> None:
    """Here it serves with at least 64 positions, and no count of the plan is touched."""

    def elements_of(config: Any) -> int | None:
        values = dict(integers(config))
        assert (values["num_attention_heads",], values["num_key_value_heads",]) == (64, 8)
        positions = values["max_position_embeddings",]
        return positions * 10 if positions >= 64 else None

    small = shrink_further(
        STRUCTURE, llama_70b(max_position_embeddings=2048), elements_of, lambda config: True, 1,
        time.monotonic() + 60,
    )  # fmt: skip
    assert 64 <= small.max_position_embeddings < 2048
    assert small.hidden_size == 8192


def test_what_cannot_be_run_is_not_taken() -> None:
    config = llama_70b(max_position_embeddings=2048)
    small = shrink_further(
        STRUCTURE, config, lambda smaller: sum(value for _, value in integers(smaller)),
        lambda smaller: False, 1, time.monotonic() + 60,
    )  # fmt: skip
    assert dict(integers(small)) == dict(integers(config))


def test_a_width_under_several_names_shrinks_under_all_of_them() -> None:
    """OPT has other parameters if its embeddings are not as wide as its layers."""
    config = T.OPTConfig(hidden_size=4096, word_embed_proj_dim=4096, ffn_dim=2048)

    def elements_of(smaller: Any) -> int | None:
        return smaller.hidden_size if smaller.hidden_size == smaller.word_embed_proj_dim else None

    small = shrink_further(
        STRUCTURE, config, elements_of, lambda smaller: True, 1, time.monotonic() + 60
    )  # fmt: skip
    assert small.hidden_size == small.word_embed_proj_dim < 4096


def test_neurons_as_many_as_features_of_heads_shrink_with_the_heads() -> None:
    def region(consumer: str, divisions: tuple[int, ...]) -> Region:
        return Region(consumer, (), max(divisions), (1, 1), 2048, divisions)

    whole = Split("row", 1, 2048, even_ranges(2048, 2))
    plan = Plan(2, "X", {"o": whole, "down": whole}, regions=(region("o", (16,)), region("down", (2048,))))
    assert structure_of(plan, llama_70b()).neurons == {}
    alone = dataclasses.replace(plan, regions=plan.regions[1:])
    assert structure_of(alone, llama_70b()).neurons == {2048: 16}


def test_experts_that_the_plan_does_not_count_become_few() -> None:
    config = T.Qwen3MoeConfig(
        hidden_size=256, intermediate_size=768, moe_intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=64, num_key_value_heads=8, head_dim=32, num_experts=256, num_experts_per_tok=2,
        vocab_size=101,
    )  # fmt: skip

    def elements_of(smaller: Any) -> int:
        return sum(p.numel() for p in build_on_meta(T.Qwen3MoeForCausalLM, smaller).parameters())

    small = shrink_further(
        STRUCTURE, config, elements_of, lambda smaller: True, 1_000_000, time.monotonic() + 60
    )  # fmt: skip
    assert 8 <= small.num_experts < 64
    assert (small.num_attention_heads, small.num_key_value_heads) == (64, 8)
    assert elements_of(small) < elements_of(config) / 8


def test_what_no_candidate_can_show_is_an_error_that_says_what_stopped_it() -> None:
    class Stubborn(T.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            if (config.vocab_size, config.hidden_size) != (500_000, 96):
                raise ValueError("only at its own width")
            super().__init__(config)

    _, config = llama(vocab_size=500_000, num_hidden_layers=2)
    plan = Plan(2, "Stubborn")
    with pytest.raises(PlanError, match=r"no small Stubborn .*only at its own width"):
        find_clone(plan, Stubborn, config)
