"""Integers are found wherever a config keeps them, and changed only in copies."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as T

from shoal.plan.settings import children, integers, vocabulary_size, with_values


def nested() -> Any:
    return T.T5GemmaConfig()


def test_integers_of_inner_configs_lists_and_mappings_are_found() -> None:
    config = T.ReformerConfig(axial_pos_shape=[4, 8])
    found = dict(integers(config))
    assert found["hidden_size",] == config.hidden_size
    assert (found["axial_pos_shape", 0], found["axial_pos_shape", 1]) == (4, 8)
    inner = dict(integers(nested()))
    assert inner["encoder", "num_hidden_layers"] == nested().encoder.num_hidden_layers
    assert not any(isinstance(value, bool) for value in inner.values())


def test_values_are_changed_in_a_copy() -> None:
    config = nested()
    before = dict(integers(config))
    changed = with_values(config, {("decoder", "num_hidden_layers"): 3})
    assert changed.decoder.num_hidden_layers == 3
    assert dict(integers(config)) == before


def test_tuples_and_lists_are_changed_too() -> None:
    config = T.ReformerConfig(axial_pos_shape=(4, 8))
    assert tuple(with_values(config, {("axial_pos_shape", 1): 2}).axial_pos_shape) == (4, 2)
    assert tuple(config.axial_pos_shape) == (4, 8)


def test_inner_configs_come_after_the_outer_one() -> None:
    assert next(path for path, _ in children(nested())) == ()
    assert ("decoder",) in [path for path, _ in children(nested())]


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (T.LlamaConfig(vocab_size=77), 77),
        (T.FSMTConfig(langs=["en", "de"], src_vocab_size=90, tgt_vocab_size=60), 60),
        (T.T5GemmaConfig(), T.T5GemmaConfig().decoder.vocab_size),
        (T.ViTConfig(), None),
    ],
)
def test_the_vocabulary_is_the_smallest_that_ids_come_from(config: Any, size: int | None) -> None:
    assert vocabulary_size(config) == size
