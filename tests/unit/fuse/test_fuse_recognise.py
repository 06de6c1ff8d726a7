"""What layers of many families compute is read off their numbers; what has no step is said by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.fuse.common import UnrecognisedError
from shoal.fuse.recipe import Attend, Combine, Foreign, Gate, LayerRecipe, Norm, Project
from shoal.fuse.recognise import recognise
from shoal.jit.team import Team
from support.fusing import layer_call, zoo_model


def recipe_of(name: str, path: str, team: Team, change: Callable[[Any], None] | None = None) -> LayerRecipe:
    """What a family's layer is said to compute, after a change of it."""
    return recognise(*layer_call(zoo_model(name), path, team, change))


def attend_of(recipe: LayerRecipe) -> Attend:
    return next(step for step in recipe.steps if isinstance(step, Attend))


LLAMA = "model.layers.0"


def test_a_llama_layer_is_nine_steps(team: Team) -> None:
    recipe = recipe_of("llama", LLAMA, team)
    kinds = [type(step) for step in recipe.steps]
    assert kinds == [Norm, Project, Attend, Project, Combine, Norm, Gate, Project, Combine]
    attend = attend_of(recipe)
    assert (attend.query_heads, attend.heads, attend.key_width) == (4, 4, 16)
    assert attend.rotary is not None and not attend.rotary.is_interleaved and attend.rotary.width == 16
    assert recipe.tables == "position_embeddings" and not recipe.foreign
    assert len(recipe.linears) == 7


def test_a_bert_layer_is_recognised_with_its_norms_after_the_sums(team: Team) -> None:
    recipe = recipe_of("bert", "bert.encoder.layer.0", team)
    assert recipe.output == "output.LayerNorm"
    assert attend_of(recipe).rotary is None
    assert sum(isinstance(step, Norm) and step.is_centred for step in recipe.steps) == 2


def test_queries_that_come_scaled_carry_the_factor_into_their_features(team: Team) -> None:
    recipe = recipe_of("opt", "model.decoder.layers.0", team)
    attend = attend_of(recipe)
    qkv = next(step for step in recipe.steps if isinstance(step, Project) and step.out == attend.source)
    factor = qkv.pieces[0].factors * attend.variant.scale
    assert torch.allclose(factor, torch.full_like(factor, attend.key_width**-0.5))


def test_heads_that_are_interleaved_in_one_linear_are_found_row_by_row(team: Team) -> None:
    recipe = recipe_of("gpt-neox", "gpt_neox.layers.0", team)
    attend = attend_of(recipe)
    qkv = next(step for step in recipe.steps if isinstance(step, Project) and step.out == attend.source)
    rows = torch.cat([piece.rows for piece in qkv.pieces])
    width = attend.key_width
    assert rows[:width].tolist() == list(range(width))
    assert rows[width : 2 * width].tolist() == list(range(3 * width, 4 * width)), "the second head's queries"


@pytest.mark.parametrize(("name", "is_one_sum"), [("gpt-neox", True), ("gpt-neox:sequential", False)])
def test_both_kinds_of_residual_are_told_apart(name: str, is_one_sum: bool, team: Team) -> None:
    recipe = recipe_of(name, "gpt_neox.layers.0", team)
    sums = [step for step in recipe.steps if isinstance(step, Combine)]
    assert [len(step.terms) for step in sums] == ([3] if is_one_sum else [2, 2])


@pytest.mark.parametrize("name", ["gpt-j", "codegen"])
def test_tables_whose_sines_come_first_are_noticed(name: str, team: Team) -> None:
    rotary = attend_of(recipe_of(name, "transformer.h.0", team)).rotary
    assert rotary is not None and rotary.is_sine_first and rotary.is_interleaved


def test_norms_of_heads_are_part_of_attention(team: Team) -> None:
    attend = attend_of(recipe_of("qwen3", LLAMA, team))
    assert attend.query_norm is not None and attend.key_norm is not None
    assert attend.query_norm.width == attend.key_width


def test_norms_of_all_heads_together_are_too(team: Team) -> None:
    attend = attend_of(recipe_of("olmo2", LLAMA, team))
    assert attend.query_norm is not None
    assert attend.query_norm.width == attend.query_heads * attend.key_width


def test_attention_sinks_are_named(team: Team) -> None:
    assert attend_of(recipe_of("gpt_oss", LLAMA, team)).sinks == "self_attn.sinks"


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "gpt_oss"])
def test_a_mixture_of_experts_goes_on_computing_for_itself(name: str, team: Team) -> None:
    recipe = recipe_of(name, LLAMA, team)
    assert recipe.foreign == ["mlp"]
    assert not any(path.startswith("mlp.") for path in recipe.linears)
    foreign = next(step for step in recipe.steps if isinstance(step, Foreign))
    assert foreign.source == "post_attention_layernorm"


def test_an_mlp_with_an_operation_that_has_no_step_does_too(team: Team) -> None:
    def clamp(layer: Any) -> None:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Hardtanh(-0.1, 0.5))

    assert recipe_of("llama", LLAMA, team, clamp).foreign == ["mlp"]


def scaled(layer: Any) -> None:
    """The layer's output is cut off: no step does that."""
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs).clamp(-0.5, 0.5)


def hooked(layer: Any) -> None:
    layer.mlp.up_proj.register_forward_hook(lambda module, args, out: None)


def squared(layer: Any) -> None:
    """Queries are squared after their linear."""
    linear = layer.self_attn.q_proj
    layer.self_attn.q_proj = nn.Sequential(linear, nn.Hardtanh())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scaled, "its output is no sum of what is known"),
        (hooked, "up_proj has hooks"),
        (squared, "where its query comes from is not seen"),
    ],
)
def test_a_layer_with_one_thing_that_has_no_step_is_refused_with_the_reason(
    change: Callable[[Any], None], reason: str, team: Team
) -> None:
    with pytest.raises(UnrecognisedError, match=reason):
        recipe_of("llama", LLAMA, team, change)


def test_a_layer_without_our_attention_is_refused(team: Team) -> None:
    layer, call = layer_call(zoo_model("llama"), LLAMA, team)
    layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)  # type: ignore[method-assign]
    with pytest.raises(UnrecognisedError, match="calls attention 0 times"):
        recognise(layer, call)
