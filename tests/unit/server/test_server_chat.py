"""``/v1/chat/completions``: messages, the order of chunks, logprobs."""

from __future__ import annotations

import pytest
from server_fake import FakeFrontend
from test_server_completions import events_of

USER = [{"role": "user", "content": "hi"}]


def test_a_conversation_is_answered(ask):
    body = ask("POST", "/v1/chat/completions", json={"messages": USER, "max_tokens": 2}).json()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "00 01 ", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert body["usage"]["prompt_tokens"] == len("user:hi;")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_work(ask, name):
    body = ask("POST", "/v1/chat/completions", json={"messages": USER, name: 3}).json()
    assert body["usage"]["completion_tokens"] == 3


def test_without_a_limit_the_context_is_the_limit(ask):
    frontend = FakeFrontend()
    body = ask("POST", "/v1/chat/completions", frontend=frontend, json={"messages": USER}).json()
    assert frontend.seen[0][1].max_tokens is None
    assert body["usage"]["total_tokens"] == frontend.max_model_len


def test_a_stream_is_role_then_text_then_reason(ask):
    request = {"messages": USER, "max_tokens": 2, "n": 2, "stream": True}
    events = events_of(ask("POST", "/v1/chat/completions", json=request).text)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events]
    assert [(c["index"], c["delta"], c["finish_reason"]) for c in choices] == [
        (0, {"role": "assistant", "content": ""}, None),
        (1, {"role": "assistant", "content": ""}, None),
        (0, {"content": "00 "}, None),
        (1, {"content": "10 "}, None),
        (0, {"content": "01 "}, None),
        (0, {}, "length"),
        (1, {"content": "11 "}, None),
        (1, {}, "length"),
    ]


def test_the_usage_chunk_of_a_stream_has_no_choices(ask):
    request = {"messages": USER, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of(ask("POST", "/v1/chat/completions", json=request).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_list_the_most_likely_tokens(ask, stream):
    request = {"messages": USER, "max_tokens": 1, "logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = ask("POST", "/v1/chat/completions", json=request)
    choices = (
        [event["choices"][0] for event in events_of(answer.text)] if stream else answer.json()["choices"]
    )
    [logprobs] = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    [token] = logprobs["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("00 ", -1.0, [48, 48, 32])
    assert [(top["token"], top["logprob"]) for top in token["top_logprobs"]] == [
        ("best", -0.5),
        ("00 ", -1.0),
    ]


def test_text_parts_are_joined_and_arguments_passed_to_the_template(ask):
    frontend = FakeFrontend()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = {
        "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": parts, "name": "me"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
    }
    assert ask("POST", "/v1/chat/completions", frontend=frontend, json=request).status_code == 200
    [(messages, arguments)] = frontend.rendered
    assert messages[1] == {"role": "user", "content": "one\ntwo", "name": "me"}
    assert arguments == {"enable_thinking": False, "add_generation_prompt": False}
