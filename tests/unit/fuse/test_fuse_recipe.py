"""Recipes say what they read, which modules they stand for, and what ranks have in common."""

from __future__ import annotations

import torch

from shoal.fuse.recipe import Combine, Foreign, Gate, LayerRecipe, Piece, Project, modules, reads


def piece(module: str, rows: list[int], factor: float = 1.0) -> Piece:
    return Piece(module, torch.tensor(rows), torch.full((len(rows),), factor))


UP, DOWN = piece("mlp.up", [0, 1, 2]), piece("mlp.down", [0, 1])
GATE = Gate("hidden", "x", piece("mlp.gate", [0, 1, 2]), UP, "silu")
STEPS = (
    GATE,
    Project("mlp.down", "hidden", (DOWN,), is_summed=True),
    Foreign("experts", "x", "experts"),
    Combine("sum", (("x", 1.0), ("mlp.down", 0.5), ("experts", 1.0))),
)


def test_a_piece_is_whole_if_it_is_all_features_in_order_as_they_are() -> None:
    assert piece("a", [0, 1, 2]).is_whole
    assert not piece("a", [1, 2]).is_whole
    assert not piece("a", [0, 2, 1]).is_whole
    assert not piece("a", [0, 1, 2], 0.5).is_whole


def test_steps_say_what_they_read_and_stand_for() -> None:
    assert [reads(step) for step in STEPS] == [["x"], ["hidden"], ["x"], ["x", "mlp.down", "experts"]]
    assert [modules(step) for step in STEPS] == [["mlp.gate", "mlp.up"], ["mlp.down"], ["experts"], []]


def test_a_recipe_names_its_linears_once_and_what_computes_for_itself() -> None:
    recipe = LayerRecipe((*STEPS, GATE), "sum", False, "")
    assert recipe.linears == ["mlp.gate", "mlp.up", "mlp.down"]
    assert recipe.foreign == ["experts"]


def test_outlines_are_equal_whatever_a_rank_holds_and_differ_where_steps_do() -> None:
    outline = LayerRecipe(STEPS, "sum", False, "").outline
    narrow = (Gate("hidden", "x", piece("mlp.gate", [0]), piece("mlp.up", [0]), "silu"), *STEPS[1:])
    assert LayerRecipe(narrow, "sum", False, "").outline == outline
    assert LayerRecipe(STEPS[1:], "sum", False, "").outline != outline
    unsummed = (STEPS[0], Project("mlp.down", "hidden", (DOWN,)), *STEPS[2:])
    assert LayerRecipe(unsummed, "sum", False, "").outline != outline
