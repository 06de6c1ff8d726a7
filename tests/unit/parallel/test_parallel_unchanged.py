"""What a program changes on a parallel model's modules between calls is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.parallel.unchanged import Unchanged


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.count = 0
        self.function = torch.relu
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.function(self.inner(x)) * self.scale


def _set_forward(model: Any) -> None:
    model[0].inner.forward = lambda x: x


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a number": (lambda model: setattr(model[0], "scale", 0.25), "0: scale"),
    "a function": (lambda model: setattr(model[0], "function", torch.tanh), "0: function"),
    "a forward": (_set_forward, "0.inner: forward"),
    "a submodule": (lambda model: setattr(model[0], "inner", nn.Linear(2, 2)), "0: its submodules"),
    "a parameter": (
        lambda model: setattr(model[0].inner, "weight", nn.Parameter(torch.ones(2, 2))),
        "0.inner: its parameters",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_on_this_rank_alone_is_refused_by_name_until_it_is_undone(what: str) -> None:
    model: Any = nn.Sequential(Block())
    change, named = CHANGES[what]
    unchanged = Unchanged(model)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    tables = {name: (dict(m._modules), dict(m._parameters)) for name, m in model.named_modules()}
    old = dict(model.named_modules())
    change(model)
    with pytest.raises(UsageError, match=named):
        unchanged.check()
    for name, module in old.items():
        vars(module).clear()
        vars(module).update(before[name])
        module._modules.update(tables[name][0])
        module._parameters.update(tables[name][1])
    unchanged.check()


def test_what_a_forward_changes_itself_is_no_change_once_noted() -> None:
    model = nn.Sequential(Block())
    unchanged = Unchanged(model)
    model(torch.ones(1, 2))
    unchanged.note()
    unchanged.check()


def test_attributes_that_are_new_and_modes_are_left_to_the_program() -> None:
    model: Any = nn.Sequential(Block())
    unchanged = Unchanged(model)
    model.note_of_the_program = 3
    model.train()
    unchanged.check()


def test_nothing_of_the_model_is_kept_alive() -> None:
    model = nn.Sequential(Block())
    kept = weakref.ref(model[0])
    unchanged = Unchanged(model)
    del model
    gc.collect()
    assert kept() is None
    unchanged.check()
