"""Recipes become operations: residuals start sums, and ranks share what is summed over them."""

from __future__ import annotations

import torch
from torch import nn

from shoal.attention.base import Variant
from shoal.cpu_kernels.attention import attend_items
from shoal.cpu_kernels.combine import combine_job
from shoal.cpu_kernels.linear import linear_job
from shoal.cpu_kernels.mlp import gated_job
from shoal.fuse.arena import Slot
from shoal.fuse.build import Draft, LayerDraft, draft_layer
from shoal.fuse.recipe import INPUT, Attend, Combine, Foreign, Gate, LayerRecipe, Piece, Project, Step
from shoal.fuse.weights import Packer

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("qkv", "up", "gate"):
            self.add_module(name, nn.Linear(WIDTH, 24))
        self.out, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(24, WIDTH)
        self.experts = nn.Identity()


def whole(module: str, count: int) -> Piece:
    return Piece(module, torch.arange(count), torch.ones(count))


def project(name: str, source: str, count: int, is_summed: bool = False) -> Project:
    return Project(name, source, (whole(name, count),), is_summed=is_summed)


ATTEND = Attend("attended", "qkv", 1, 1, WIDTH, WIDTH, Variant(1.0, None, None), None, None, None, "self", "")
GATE = Gate("hidden", INPUT, whole("gate", 24), whole("up", 24), "silu")


def draft(*steps: Step, output: str, is_first_rank: bool = True) -> LayerDraft:
    recipe = LayerRecipe((project("qkv", INPUT, 24), ATTEND, *steps), output, False, "")
    layer = Layer()
    return draft_layer(recipe, layer, 3, Packer(layer, "float32", is_first_rank), WIDTH, is_first_rank)


def jobs(draft: LayerDraft) -> list[object]:
    """What is called, after attention: jobs, or the value that is summed over ranks, or a module."""
    start = next(i for i, one in enumerate(draft.operations) if one.job is attend_items) + 2
    return [one.job or one.called or one.value for one in draft.operations[start:]]


def values(operation: Draft) -> list[str]:
    """The values that an operation's words are addresses of."""
    keys = [word.key for word in operation.words if isinstance(word, Slot)]
    return [key[1] for key in keys if isinstance(key, tuple) and key[0] == "value"]


def parallel(is_summed: bool) -> tuple[Step, ...]:
    """Attention and MLP side by side."""
    terms = ((INPUT, 1.0), ("out", 1.0), ("down", 1.0))
    out, down = project("out", "attended", WIDTH, is_summed), project("down", "hidden", WIDTH, is_summed)
    return out, GATE, down, Combine("sum", terms)


def test_a_residual_starts_the_sum_of_the_linears_that_are_added_to_it() -> None:
    made = draft(*parallel(False), output="sum")
    assert jobs(made) == [linear_job, gated_job, linear_job]
    assert values(made.operations[-3]) == ["attended", INPUT, "sum"]
    assert values(made.operations[-1]) == ["hidden", "sum", "sum"]


def test_over_ranks_one_sum_serves_both_linears_and_one_rank_brings_the_residual() -> None:
    for is_first in (True, False):
        made = draft(*parallel(True), output="sum", is_first_rank=is_first)
        assert jobs(made) == [linear_job, gated_job, linear_job, "sum"]
        wanted = ["attended", INPUT, "sum"] if is_first else ["attended", "sum"]
        assert values(made.operations[-4]) == wanted
        assert values(made.operations[-2]) == ["hidden", "sum", "sum"]


def test_a_residual_with_a_factor_is_written_first() -> None:
    terms = ((INPUT, 0.5), ("out", 1.0))
    made = draft(project("out", "attended", WIDTH), Combine("sum", terms), output="sum")
    assert jobs(made) == [combine_job, linear_job]


def test_a_linear_with_a_factor_or_another_reader_is_added_afterwards() -> None:
    scaled = Combine("sum", ((INPUT, 1.0), ("out", 0.5)))
    assert jobs(draft(project("out", "attended", WIDTH), scaled, output="sum")) == [linear_job, combine_job]
    first = Combine("sum", ((INPUT, 1.0), ("out", 1.0)))
    second = Combine("twice", (("sum", 1.0), ("out", 1.0)))
    made = draft(project("out", "attended", WIDTH), first, second, output="twice")
    assert jobs(made) == [linear_job, combine_job, combine_job]


def test_a_module_that_computes_for_itself_is_called_between_the_jobs() -> None:
    made = draft(
        project("out", "attended", WIDTH),
        Foreign("experts", INPUT, "experts"),
        Combine("sum", (("out", 1.0), ("experts", 1.0))),
        output="sum",
    )
    assert [type(one) for one in jobs(made)][1] is nn.Identity
    assert jobs(made)[0] is linear_job and jobs(made)[2] is combine_job
    assert made.widths["experts"] == WIDTH


def test_slots_of_pages_and_tables_carry_the_layers_number() -> None:
    made = draft(project("out", "attended", WIDTH), output="out")
    keys = {word.key for one in made.operations for word in one.words if isinstance(word, Slot)}
    assert {("keys", 3), ("values", 3), "rows", "slots"} <= keys
