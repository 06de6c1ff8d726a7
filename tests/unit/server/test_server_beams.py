"""A search asked for over HTTP reaches the engine as it was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from server_fake import FakeFrontend


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (1, 1, None, None, None)),
        ({"num_beams": 4}, (1, 4, None, None, None)),
        ({"use_beam_search": True, "n": 3, "length_penalty": 0.5}, (3, 3, 0.5, None, None)),
        ({"num_beams": 2, "early_stopping": "never"}, (1, 2, None, "never", None)),
        ({"num_beams": 2, "early_stopping": True}, (1, 2, None, True, None)),
        ({"forced_bos_token_id": 7}, (1, 1, None, None, 7)),
    ],
)
def test_a_search_is_passed_on(ask: Any, fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    frontend = FakeFrontend()
    answer = ask("POST", "/v1/completions", json={"prompt": "hi", **fields}, frontend=frontend)
    assert answer.status_code == 200
    [(_, params)] = frontend.seen
    got = params.n, params.num_beams, params.length_penalty, params.early_stopping
    assert (*got, params.forced_bos_token_id) == expected


def test_what_goes_with_a_search_is_passed_on(ask: Any) -> None:
    frontend = FakeFrontend()
    fields = {"num_beams": 4, "n": 2, "no_repeat_ngram_size": 3, "stop": ["."], "logprobs": 2}
    answer = ask("POST", "/v1/completions", json={"prompt": "hi", **fields}, frontend=frontend)
    assert answer.status_code == 200
    [(_, params)] = frontend.seen
    assert (params.no_repeat_ngram_size, params.stop, params.logprobs) == (3, (".",), 2)


def test_what_beams_cannot_do_is_refused_by_name(ask: Any) -> None:
    body = {"prompt": "hi", "num_beams": 2, "temperature": 0.7}
    answer = ask("POST", "/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"
