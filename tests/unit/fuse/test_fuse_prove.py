"""A recipe with one thing wrong gives other numbers than its layer, and is found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shoal.attention.base import KVShape
from shoal.attention.cpu import CpuPaged
from shoal.comm.local import LocalComm
from shoal.fuse.buffers import Buffers
from shoal.fuse.build import draft_layer
from shoal.fuse.prove import difference, proof_inputs
from shoal.fuse.recipe import INPUT, Attend, Combine, Gate, LayerRecipe, Norm, Piece, Project, Step
from shoal.fuse.recognise import recognise
from shoal.fuse.stack import Stack
from shoal.fuse.weights import Packer
from shoal.jit.team import Team
from support.fusing import layer_call, zoo_model

LAYERS = {"qwen3": "model.layers.0", "gpt-j": "transformer.h.0", "gemma2": "model.layers.0"}


def error_of(family: str, team: Team, change: Callable[[Step], Step] = lambda step: step) -> float:
    """How far a family's layer is from its recipe after every step went through ``change``."""
    layer, call = layer_call(zoo_model(family), LAYERS[family], team)
    recipe = recognise(layer, call)
    recipe = LayerRecipe(tuple(map(change, recipe.steps)), recipe.output, recipe.is_tuple, recipe.tables)
    attend = next(step for step in recipe.steps if isinstance(step, Attend))
    draft = draft_layer(recipe, layer, 0, Packer(layer, "float32"), call.hidden.shape[2], True)
    stack = Stack([(draft, recipe.output)], CpuPaged(team), LocalComm(), Buffers())
    shape = KVShape(attend.heads, attend.key_width, attend.value_width)
    generator = torch.Generator().manual_seed(0)
    inputs = proof_inputs(layer, call.hidden.shape, generator, LocalComm())
    return difference(stack, 0, layer, call, shape, inputs)


@pytest.mark.parametrize("family", sorted(LAYERS))
def test_a_right_recipe_agrees_to_rounding(family: str, team: Team) -> None:
    assert error_of(family, team) < 2e-5


def other_pairs(step: Step) -> Step:
    if not isinstance(step, Attend) or step.rotary is None:
        return step
    return replace(step, rotary=replace(step.rotary, is_interleaved=not step.rotary.is_interleaved))


def other_tables(step: Step) -> Step:
    if not isinstance(step, Attend) or step.rotary is None:
        return step
    return replace(step, rotary=replace(step.rotary, is_sine_first=not step.rotary.is_sine_first))


def no_rotary(step: Step) -> Step:
    return replace(step, rotary=None) if isinstance(step, Attend) else step


def no_residual(step: Step) -> Step:
    if not isinstance(step, Combine):
        return step
    return replace(step, terms=tuple(term for term in step.terms if term[0] != INPUT))


def other_eps(step: Step) -> Step:
    return replace(step, eps=1e-3) if isinstance(step, Norm) else step


def other_activation(step: Step) -> Step:
    return (
        replace(step, activation="gelu" if step.activation != "gelu" else "silu")
        if isinstance(step, Gate)
        else step
    )


def no_norm_of_heads(step: Step) -> Step:
    return replace(step, query_norm=None) if isinstance(step, Attend) else step


def narrow_window(step: Step) -> Step:
    return replace(step, variant=step.variant._replace(window=3)) if isinstance(step, Attend) else step


def swapped_heads(step: Step) -> Step:
    """The first two key heads trade places."""
    if not isinstance(step, Project) or len(step.pieces) != 3:
        return step
    query, key, value = step.pieces
    half = len(key.rows) // 2
    rows = torch.cat([key.rows[half:], key.rows[:half]])
    return replace(step, pieces=(query, Piece(key.module, rows, key.factors), value))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", other_pairs),
        ("gpt-j", other_tables),
        ("qwen3", no_rotary),
        ("qwen3", no_residual),
        ("qwen3", other_eps),
        ("qwen3", other_activation),
        ("qwen3", no_norm_of_heads),
        ("qwen3", narrow_window),
        ("qwen3", swapped_heads),
    ],
)
def test_a_recipe_with_one_thing_wrong_is_found_out(
    family: str, change: Callable[[Step], Step], team: Team
) -> None:
    assert error_of(family, team, change) > 2e-4


def test_numbers_that_are_none_are_infinitely_far(team: Team) -> None:
    def broken(step: Step) -> Step:
        if not isinstance(step, Combine):
            return step
        return replace(step, terms=tuple((name, float("nan")) for name, _ in step.terms))

    assert error_of("qwen3", team, broken) == float("inf")
