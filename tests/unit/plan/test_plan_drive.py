"""What a model is called with, and that it is put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_outputs import MultipleChoiceModelOutput, Seq2SeqSequenceClassifierOutput

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


class TwoKinds(nn.Module):
    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        return input_ids + 0.5


def test_two_kinds_of_tokens_are_given_where_the_config_has_no_table_of_them() -> None:
    batch = with_special_inputs(TwoKinds, SimpleNamespace(vocab_size=9), batch_of(9, 2, 12))
    assert batch is not None
    assert batch.special["token_type_ids"].unique().tolist() == [0, 1]
    tabled = SimpleNamespace(vocab_size=9, type_vocab_size=2)
    assert with_special_inputs(TwoKinds, tabled, batch_of(9, 2, 12)) is None


class Choices(nn.Module):
    given: tuple[torch.Tensor, torch.Tensor]

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> MultipleChoiceModelOutput | torch.Tensor:
        self.given = (input_ids, attention_mask)
        return input_ids + 0.5


def test_a_model_of_multiple_choice_gets_rows_of_several_choices() -> None:
    model, batch = Choices(), batch_of(50, 3, 7, padding=2)
    prefill_pass(model, batch)
    ids, mask = model.given
    assert ids.shape == mask.shape == (3, 2, 7)
    assert torch.equal(ids[:, 0], batch.ids) and not torch.equal(ids[:, 1], batch.ids)
    assert torch.equal(mask[:, 1], batch.mask)


class SummingUp(nn.Module):
    """Classifies by the last end token, as encoder-decoders do."""

    config = SimpleNamespace(is_encoder_decoder=True, eos_token_id=7)
    given: tuple[torch.Tensor, torch.Tensor | None]

    def forward(
        self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor | None = None
    ) -> Seq2SeqSequenceClassifierOutput | torch.Tensor:
        self.given = (input_ids, decoder_input_ids)
        return input_ids + 0.5


def test_what_classifies_by_the_end_token_gets_one_in_each_row_and_decodes_its_own_ids() -> None:
    model, batch = SummingUp(), batch_of(9, 3, 12)
    assert bool((batch.ids == 7).any())
    prefill_pass(model, batch)
    ids, targets = model.given
    assert (ids == 7).nonzero()[:, 1].tolist() == [11, 11, 11]
    assert targets is None


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


class Cached(nn.Module):
    """Makes a cache by what it looks up in an object."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        return input_ids + (0.5 * self.source.num_hidden_layers if use_cache else 0.25)


def test_a_model_whose_cache_asks_for_what_its_config_lacks_is_driven_without_one() -> None:
    batch = batch_of(20, 2, 5)
    (output,) = prefill_pass(Cached(PreTrainedConfig()), batch).outputs
    assert torch.equal(output, batch.ids + 0.25)
    (output,) = prefill_pass(Cached(LlamaConfig(num_hidden_layers=3)), batch).outputs
    assert torch.equal(output, batch.ids + 1.5)
    with pytest.raises(AttributeError, match="num_hidden_layers"):  # of anything else it is a mistake
        prefill_pass(Cached(SimpleNamespace()), batch)


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
