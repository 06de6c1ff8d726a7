"""What a model is called with, and that it is put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shoal.plan.drive import batch_of, prefill_pass, restored, with_special_inputs


class Entities(nn.Module):
    """Takes a second sequence of ids, and says what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.given: dict[str, Any] = {}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        thing_ids: torch.Tensor | None = None,
        thing_attention_mask: torch.Tensor | None = None,
        thing_position_ids: torch.Tensor | None = None,
        perm_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.given = {"thing_ids": thing_ids, "positions": thing_position_ids, "perm_mask": perm_mask}
        return input_ids * self.scale


class Plain(nn.Module):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input_ids + 0.5


def test_a_model_that_takes_only_ids_and_mask_has_no_special_batch() -> None:
    assert with_special_inputs(Plain, SimpleNamespace(vocab_size=9), batch_of(9, 1, 4)) is None


def test_further_ids_are_drawn_from_their_own_vocabulary_and_point_at_tokens() -> None:
    config = SimpleNamespace(vocab_size=50, thing_vocab_size=3)
    batch = with_special_inputs(Entities, config, batch_of(50, 2, 6))
    assert batch is not None
    ids, positions = batch.special["thing_ids"], batch.special["thing_position_ids"]
    assert ids.shape == batch.special["thing_attention_mask"].shape
    assert int(ids.min()) > 0 and int(ids.max()) < 3
    assert positions.shape[:2] == ids.shape and int(positions.max()) < 6 and int(positions.min()) == -1


def test_without_a_vocabulary_of_their_own_further_ids_are_not_guessed() -> None:
    batch = with_special_inputs(Entities, SimpleNamespace(vocab_size=50), batch_of(50, 2, 6))
    assert batch is not None
    assert set(batch.special) == {"perm_mask"}


def test_special_arguments_reach_the_model_in_its_own_dtype() -> None:
    model = Entities()
    batch = with_special_inputs(Entities, SimpleNamespace(vocab_size=50), batch_of(50, 1, 6))
    assert batch is not None
    prefill_pass(model, batch)
    assert model.given["perm_mask"].dtype == torch.float64
    assert model.given["thing_ids"] is None


def test_a_model_that_replaces_its_own_modules_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first, weight = model[0], model[0].weight
    with restored(model):
        model[0] = nn.Identity()
        model.count = 3  # type: ignore[assignment]
        first.weight = nn.Parameter(torch.zeros(2, 2))
    assert model[0] is first
    assert first.weight is weight
    assert not hasattr(model, "count")
