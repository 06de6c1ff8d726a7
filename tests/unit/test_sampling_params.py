"""Sampling fields are checked one by one, and a refusal names its field."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", True), ("n", 10**30), ("temperature", -0.1), ("temperature", float("nan")),
        ("temperature", "hot"), ("top_p", 0), ("top_p", 1.01), ("top_k", -2), ("top_k", 2**70), ("min_p", -1),
        ("repetition_penalty", 0), ("repetition_penalty", 1e-300), ("repetition_penalty", 1e300),
        ("no_repeat_ngram_size", -1), ("no_repeat_ngram_size", 2.0), ("presence_penalty", 2.5),
        ("frequency_penalty", -3), ("seed", 2**63),
        ("stop", 5), ("stop", ""), ("stop", ["a", 3]), ("stop_token_ids", 5), ("stop_token_ids", [-1]),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**31), ("min_tokens", -1),
        ("min_tokens", 2**70), ("logprobs", 21), ("logit_bias", [1]), ("logit_bias", {1: 101}),
        ("ignore_eos", "no"), ("skip_special_tokens", 1), ("include_stop_str_in_output", 3),
    ],
)  # fmt: skip
def test_a_value_out_of_range_or_of_the_wrong_type_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}: ") as caught:
        SamplingParams(**{"max_tokens": None, field: value})
    assert caught.value.field == field


def test_unset_fields_take_the_models_values_then_the_neutral_ones() -> None:
    params = SamplingParams(top_p=0.5).with_defaults({"top_p": 0.9, "top_k": 7, "nonsense": 1})
    assert (params.top_p, params.top_k, params.temperature, params.min_p) == (0.5, 7, 1.0, 0.0)
    beams = SamplingParams(num_beams=2, early_stopping=False).with_defaults(
        {"length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3}
    )
    assert (beams.length_penalty, beams.early_stopping, beams.no_repeat_ngram_size) == (2.0, False, 3)


def test_an_explicit_do_sample_false_means_greedy_unless_a_temperature_is_asked_for() -> None:
    assert SamplingParams().with_defaults({"do_sample": False, "temperature": 0.7}).temperature == 0
    assert SamplingParams(temperature=0.3).with_defaults({"do_sample": False}).temperature == 0.3


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_beams", {"num_beams": 0}),
        ("num_beams", {"num_beams": 2.0}),
        ("length_penalty", {"length_penalty": float("inf")}),
        ("length_penalty", {"length_penalty": 1e308}),
        ("length_penalty", {"length_penalty": -31}),
        ("early_stopping", {"early_stopping": "always"}),
        ("n", {"num_beams": 2, "n": 3}),
        ("temperature", {"num_beams": 2, "temperature": 0.5}),
        ("forced_bos_token_id", {"forced_bos_token_id": -1}),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{field}: ") as caught:
        SamplingParams(**values)
    assert caught.value.field == field


def test_beams_are_greedy_whatever_the_model_is_used_with() -> None:
    assert SamplingParams(num_beams=2).with_defaults({"temperature": 0.7}).temperature == 0.0
