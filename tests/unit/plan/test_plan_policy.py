"""Policies as given: the three shapes, files, and what is refused before any model is looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shoal.errors import UsageError
from shoal.plan.policy import STYLES, Policy, read_policy


class Block(nn.Module):
    """Stands for a model's block."""


def test_nothing_asked_for_is_no_policy() -> None:
    assert read_policy(None) is None
    assert read_policy({}) is None


def test_a_class_and_its_name_are_the_same_key() -> None:
    by_class, by_name = (
        read_policy({Block: ("attn.o", "mlp.down")}),
        read_policy({"Block": ["attn.o", "mlp.down"]}),
    )
    assert by_class == by_name == Policy((("Block", ("attn.o", "mlp.down")),))


def test_a_policy_that_was_read_is_taken_as_it_is() -> None:
    policy = read_policy({"layers.*.q": "column"})
    assert read_policy(policy) is policy


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_says_what_a_mapping_says(tmp_path: Path, suffix: str) -> None:
    content: dict[str, Any] = {"Block": ["attn.o"], "lm_head": "gather"}
    path = tmp_path / f"policy.{suffix}"
    path.write_text(json.dumps(content) if suffix == "json" else "Block:\n- attn.o\nlm_head: gather\n")
    assert read_policy(path) == read_policy(str(path)) == read_policy(content)


def test_equal_policies_have_equal_texts_and_others_have_not() -> None:
    first, second = read_policy({"a.*": "row"}), read_policy({"a.*": "row"})
    other = read_policy({"a.*": "rowwise"})
    assert first is not None and second is not None and other is not None
    assert first.text() == second.text() != other.text()


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (3, "not int"),
        ({3: "row"}, "3: a key is"),
        ({"": "row"}, "'': a key is"),
        ({"a.*.b": 5}, r"a\.\*\.b: 5: a value is"),
        ({"a.*.b": ()}, "a value is"),
        ({"a.*.b": ["x", 3]}, "a value is"),
        ({Block: Block}, "Block: .* a value is"),
        ({"a.*.b": "colum"}, "unknown style 'colum'; nearest are: column"),
        ({"a.*.b": "sequence_parallel"}, "sequence_parallel: .* not built"),
        ({"a.*.b": "embedding_colwise"}, "say vocab"),
    ],
)
def test_a_malformed_policy_is_refused_naming_the_key(policy: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        read_policy(policy)
    assert caught.value.field == "policy"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        ("{", "neither JSON nor YAML"),
        ("- row", "not list"),
        ('{"*.q": "column", "*.k": "row", "*.q": "replicate"}', r"\*\.q: it is there twice"),
    ],
)
def test_a_file_that_holds_no_policy_is_refused(tmp_path: Path, content: str | None, told: str) -> None:
    path = tmp_path / "policy.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=told):
        read_policy(path)


def test_every_style_of_the_installed_transformers_is_known_or_refused_by_name() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    refused = {"sequence_parallel", "embedding_colwise"}
    assert set(ALL_PARALLEL_STYLES.keys()) - STYLES.keys() <= refused
