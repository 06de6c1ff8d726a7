"""A search asked for over HTTP reaches the engine as it was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from server_fake import FakeFrontend


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (1, 1, 1.0, False, None)),
        ({"num_beams": 4}, (1, 4, 1.0, False, None)),
        ({"use_beam_search": True, "n": 3, "length_penalty": 0.5}, (3, 3, 0.5, False, None)),
        ({"num_beams": 2, "early_stopping": "never"}, (1, 2, 1.0, "never", None)),
        ({"num_beams": 2, "early_stopping": True}, (1, 2, 1.0, True, None)),
        ({"forced_bos_token_id": 7}, (1, 1, 1.0, False, 7)),
    ],
)
def test_a_search_is_passed_on(ask: Any, fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    frontend = FakeFrontend()
    answer = ask("POST", "/v1/completions", json={"prompt": "hi", **fields}, frontend=frontend)
    assert answer.status_code == 200
    [(_, params)] = frontend.seen
    got = params.n, params.num_beams, params.length_penalty, params.early_stopping
    assert (*got, params.forced_bos_token_id) == expected


def test_what_beams_cannot_do_is_refused_by_name(ask: Any) -> None:
    body = {"prompt": "hi", "num_beams": 2, "temperature": 0.7}
    answer = ask("POST", "/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"
