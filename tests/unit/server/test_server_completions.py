"""``/v1/completions``: prompts, branches, logprobs, streaming bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_fake import FakeFrontend

from shoal.errors import EngineDeadError, EngineError, QueueFullError
from shoal.server.settings import ServerSettings


def events_of(body: str) -> list[Any]:
    """The decoded events of a stream; fails unless each is ``data: ...`` and a blank line."""
    assert body.endswith("\n\n")
    events = body[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def test_a_text_prompt_is_completed(ask):
    answer = ask("POST", "/v1/completions", json={"model": "demo", "prompt": "hi", "max_tokens": 3})
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == "demo"
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "text": "00 01 02 ",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_max_tokens_is_16_unless_given(ask):
    assert ask("POST", "/v1/completions", json={"prompt": "a"}).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_form_of_prompt_reaches_the_engine(ask, prompt, expected):
    frontend = FakeFrontend()
    answer = ask("POST", "/v1/completions", frontend=frontend, json={"prompt": prompt, "max_tokens": 1})
    assert [given for given, _ in frontend.seen] == expected
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(expected)))


@pytest.mark.parametrize("stream", [False, True])
def test_branches_of_several_prompts_are_numbered_through(ask, stream):
    request = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 2, "echo": True, "stream": stream}
    answer = ask("POST", "/v1/completions", json=request)
    texts = {}
    if stream:
        for event in events_of(answer.text):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    else:
        texts = {choice["index"]: choice["text"] for choice in answer.json()["choices"]}
        assert answer.json()["usage"]["prompt_tokens"] == 3
        assert answer.json()["usage"]["completion_tokens"] == 8
    assert texts == {0: "a00 01 ", 1: "a10 11 ", 2: "bc00 01 ", 3: "bc10 11 "}


def test_a_stream_is_events_then_done(ask):
    answer = ask("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert [event["choices"][0]["text"] for event in events] == ["00 ", "01 "]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "length"]
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


def test_include_usage_adds_a_last_chunk_without_choices(ask):
    request = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of(ask("POST", "/v1/completions", json=request).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 3


def test_continuous_usage_counts_up(ask):
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": options}
    chunks = events_of(ask("POST", "/v1/completions", json=request).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


def test_a_stop_string_is_told_as_stop_reason(ask):
    choice = ask("POST", "/v1/completions", json={"prompt": "a", "stop": "02"}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("00 01 ", "stop", "02")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_parallel_lists_without_infinities(ask, stream):
    request = {"prompt": "a", "max_tokens": 2, "logprobs": 3, "stream": stream}
    answer = ask("POST", "/v1/completions", json=request)
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in events_of(answer.text)]
        logprobs = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    else:
        logprobs = answer.json()["choices"][0]["logprobs"]
    top = {"best": -0.5, "never": -9999.0}
    assert logprobs == {
        "tokens": ["00 ", "01 "],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"00 ": -1.0, **top}, {"01 ": -1.0, **top}],
        "text_offset": [0, 3],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_told_on_request(ask, stream):
    body = {"prompt": "ab", "max_tokens": 3, "n": 2, "return_token_ids": True, "stream": stream}
    answer = ask("POST", "/v1/completions", json=body)
    choices = [choice for event in events_of(answer.text) for choice in event["choices"]] if stream else None
    ids: dict[int, list[int]] = {}
    for choice in choices or answer.json()["choices"]:
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert ids == {0: [100, 101, 102], 1: [100, 101, 102]}


def test_sampling_fields_reach_the_engine(ask):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 1, "frequency_penalty": -1, "seed": 7, "stop": ["x", "y"], "stop_token_ids": [3],
        "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 9, "min_tokens": 2, "n": 2,
        "skip_special_tokens": False,
    }  # fmt: skip
    frontend = FakeFrontend()
    request = {
        "prompt": "a",
        "logit_bias": {"12": -100},
        "best_of": 2,
        "user": "me",
        "suffix": None,
        **fields,
    }
    assert ask("POST", "/v1/completions", frontend=frontend, json=request).status_code == 200
    [(_, params)] = frontend.seen
    given = {name: getattr(params, name) for name in fields}
    assert given == {**fields, "stop": ("x", "y"), "stop_token_ids": (3,)}
    assert params.logit_bias == {12: -100}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (QueueFullError("8 requests wait", retry_after_s=2.4), 429, "rate_limit_error"),
        (EngineDeadError("gave up"), 503, "server_error"),
        (EngineError("broke"), 500, "server_error"),
    ],
)
def test_a_refusal_has_its_own_status_also_when_streaming(ask, stream, refusal, status, kind):
    answer = ask(
        "POST",
        "/v1/completions",
        frontend=FakeFrontend(refusal=refusal),
        json={"prompt": "a", "stream": stream},
    )
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind and answer.json()["error"]["message"] == str(refusal)
    assert answer.headers.get("retry-after") == ("3" if status == 429 else None)


def test_a_failed_branch_is_a_500(ask):
    frontend = FakeFrontend()
    frontend.branch_error = "NaN in the logits"
    answer = ask("POST", "/v1/completions", frontend=frontend, json={"prompt": ["a", "b"]})
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "NaN in the logits"
    assert not frontend.running


def test_a_branch_that_fails_while_streaming_ends_in_an_error_event(ask):
    frontend = FakeFrontend()
    frontend.branch_error = "NaN in the logits"
    answer = ask("POST", "/v1/completions", frontend=frontend, json={"prompt": "a", "stream": True})
    assert answer.status_code == 200
    first, last = events_of(answer.text)
    assert first["choices"][0]["text"] == "00 "
    assert last["error"] == {
        "message": "NaN in the logits",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert not frontend.running


def test_an_aborted_request_is_a_503(ask):
    frontend = FakeFrontend()
    frontend.finish_reason = "abort"
    assert ask("POST", "/v1/completions", frontend=frontend, json={"prompt": "a"}).status_code == 503


def test_one_refused_prompt_refuses_all_and_leaves_nothing_running(ask):
    frontend = FakeFrontend()
    answer = ask(
        "POST", "/v1/completions", frontend=frontend, json={"prompt": ["a", "b" * 100], "stream": True}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
    assert not frontend.running


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_timeout_aborts(ask, stream):
    frontend = FakeFrontend(hang_after=1)
    settings = ServerSettings(model="demo", request_timeout_s=0.05)
    answer = ask(
        "POST",
        "/v1/completions",
        frontend=frontend,
        settings=settings,
        json={"prompt": "a", "stream": stream},
    )
    if stream:
        assert answer.status_code == 200
        assert events_of(answer.text)[-1]["error"]["code"] == "request_timeout"
    else:
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "request_timeout"
    assert len(frontend.aborted) == 1 and not frontend.running
