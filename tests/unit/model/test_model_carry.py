"""What a model carries from call to call is found, taken out and put back, whatever it hangs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.model.carry import Seen, attributes_of, changed_attributes, look, restore

MODULE = LlamaForCausalLM(
    LlamaConfig(vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
)


class Memory:
    """A cache of its own kind: rows in the second dimension of one tensor, in the first of another."""

    def __init__(self, rows: int, count: int = 0) -> None:
        self.sums = {"first": torch.full((3, rows, 2), float(count)), "none": None}
        self.steps = [torch.full((rows,), count)]
        self.constant = torch.arange(4)


def runs(make: Any) -> list[Seen]:
    return [Seen({"memory": make(rows, count)}, {}) for rows, count in ((1, 5), (2, 5), (1, 7))]


def test_what_was_taken_out_is_put_back_for_other_rows() -> None:
    carry = look(MODULE, runs(Memory))
    assert [(spec.shape, spec.batch_dim) for spec in carry.specs] == [((3, 2), 1), ((), 0)]
    assert [spec.num_bytes for spec in carry.specs] == [24, 8]
    kept = carry.take({"memory": Memory(3, 9)})
    assert [tuple(tensor.shape) for tensor in kept] == [(3, 3, 2), (3,)]
    memory = carry.put([tensor[:2] for tensor in kept])["memory"]
    assert torch.equal(memory.sums["first"], torch.full((3, 2, 2), 9.0))
    assert torch.equal(memory.steps[0], torch.full((2,), 9))
    assert torch.equal(memory.constant, torch.arange(4))
    again = carry.put([tensor[2:] for tensor in kept])["memory"]
    assert again is not memory and again.steps is not memory.steps


def test_a_call_that_leaves_something_else_is_found_out() -> None:
    carry = look(MODULE, runs(Memory))
    with pytest.raises(RuntimeError, match="keeps 1 tensors where it kept 3"):
        carry.take({"memory": [torch.zeros(1)]})


def test_what_grows_with_the_tokens_is_no_state() -> None:
    with pytest.raises(TypeError, match="grows with every token"):
        look(MODULE, runs(lambda rows, count: torch.zeros(rows, count)))


def test_what_does_not_change_with_the_rows_is_no_state() -> None:
    with pytest.raises(TypeError, match="keeps no state"):
        look(MODULE, runs(lambda rows, count: torch.zeros(4)))


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be told apart"):
        look(MODULE, runs(lambda rows, count: torch.zeros(3 * rows)))


def test_attributes_of_modules_are_a_state_too() -> None:
    """They are set before a call, begin at zero, and can be given back as they were."""
    module: Any = nn.Linear(2, 2)
    initial = attributes_of(module)
    seen = []
    for rows in (1, 2, 1):
        module.state = torch.ones(rows, 2)
        seen.append(Seen({}, changed_attributes(module, initial)))
    restore(seen[0].attributes, initial)
    assert not hasattr(module, "state")
    carry = look(module, seen)
    carry.forget(3, torch.device("cpu"))
    assert torch.equal(module.state, torch.zeros(3, 2))
    carry.module.config = None
    assert carry.put([torch.full((2, 2), 4.0)]) == {}
    assert torch.equal(module.state, torch.full((2, 2), 4.0))
    assert torch.equal(carry.take({})[0], module.state)
