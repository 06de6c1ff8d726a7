"""Integers that remember where they come from."""

from __future__ import annotations

import copy

import torch

from shoal.plan.integers import IntegerKey, IntegerTrace, TracedInt

HEADS = IntegerKey("a.*", "A", "num_heads", 4)
SIZE = IntegerKey("a.*", "A", "head_dim", 8)


def test_arithmetic_keeps_all_sources_and_the_value() -> None:
    heads, size = TracedInt(4, (HEADS,)), TracedInt(8, (SIZE,))
    for result, value in [
        (heads * size, 32),
        (2 * heads, 8),
        (size // heads, 2),
        (size - 1, 7),
        (-heads, -4),
    ]:
        assert result == value
        assert isinstance(result, TracedInt)
    assert set((heads * size + 1).sources) == {HEADS, SIZE}
    assert type(size**-0.5) is float


def test_a_traced_integer_can_be_copied() -> None:
    assert copy.deepcopy(TracedInt(4, (HEADS,))).sources == (HEADS,)


def test_the_operation_that_used_an_integer_last_is_named_first() -> None:
    heads, size = TracedInt(4, (HEADS,)), TracedInt(8, (SIZE,))
    with IntegerTrace() as trace:
        x = torch.zeros(2, 32).view(2, heads, 8)
        x.split(size, -1)
    assert trace.suspects() == [SIZE, HEADS]


def test_integers_in_slices_and_shapes_are_seen() -> None:
    with IntegerTrace() as trace:
        torch.zeros(32)[: TracedInt(8, (SIZE,))]
    assert trace.suspects() == [SIZE]
