"""Tensors are found wherever they are, in an order that two ranks share."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from shoal.parallel.walk import walk, walk_call

Pair = namedtuple("Pair", "a b")


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


def found(value: Any) -> list[tuple[float, bool]]:
    seen: list[tuple[float, bool]] = []

    def visit(tensor: torch.Tensor, is_state: bool) -> torch.Tensor:
        seen.append((float(tensor), is_state))
        return tensor

    walk(value, visit)
    return seen


def t(value: float) -> torch.Tensor:
    return torch.tensor(value)


def test_containers_are_searched_in_order_and_objects_are_state() -> None:
    value = [
        t(1),
        (t(2), {"k": t(3)}),
        Pair(t(4), None),
        Slotted(t(5)),
        Frozen(t(6)),
        UserDict(u=t(7)),
        "text",
    ]
    assert found(value) == [(1, False), (2, False), (3, False), (4, False), (5, True), (6, True), (7, True)]
    assert found(copy.deepcopy(value)) == found(value)


def test_modules_are_left_alone() -> None:
    assert found([nn.Linear(2, 2), nn.Linear]) == []


def test_a_loop_ends_and_an_object_is_walked_once() -> None:
    one = Frozen(t(1))
    loop: list[Any] = [one, one]
    loop.append(loop)
    assert found(loop) == [(1, True)]


def test_replacements_are_made_in_place_but_for_tuples() -> None:
    value = [t(1), (t(2), Pair(t(3), "x")), Frozen(t(4))]
    pair = value[1]
    out = walk(value, lambda tensor, _: tensor + 10)
    assert out is value and value[0] == 11 and value[2].x == 14  # type: ignore[union-attr]
    assert value[1][0] == 12 and value[1][1] == Pair(t(13), "x") and pair[0] == 2  # type: ignore[index]


def test_output_fields_that_are_taken_back_are_state() -> None:
    output = BaseModelOutput(last_hidden_state=t(1), hidden_states=(t(2),))
    states = []
    walk_call(
        (),
        {},
        output,
        lambda tensor, is_state: states.append(is_state) or tensor,
        frozenset({"hidden_states"}),
    )
    assert states == [False, True]
