"""Every refusal is OpenAI's nested body and names the field; nothing wrong reaches the engine."""

from __future__ import annotations

import pytest
from server_fake import FakeFrontend, dead_frontend

from shoal.errors import RequestError
from shoal.server.settings import ServerSettings

USER = {"role": "user", "content": "hi"}


def error_of(answer, status: int) -> dict:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": "a" * 100}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
        ({"echo": True, "prompt": [1, 2]}, "echo"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"model": 5}, "model"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_a_bad_completion_field_is_named(ask, change, param):
    frontend = FakeFrontend()
    answer = ask("POST", "/v1/completions", frontend=frontend, json={"prompt": "a", **change})
    error = error_of(answer, 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}:")
    assert not frontend.seen


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "hi", "name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 2, "max_tokens": 3}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ],
)
def test_a_bad_chat_field_is_named(ask, change, param):
    frontend = FakeFrontend()
    answer = ask("POST", "/v1/chat/completions", frontend=frontend, json={"messages": [USER], **change})
    assert error_of(answer, 400)["param"] == param
    assert not frontend.seen


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": "a", "temperature": NaN}',
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(ask, content):
    assert "body" in error_of(ask("POST", "/v1/completions", content=content), 400)["message"]


def test_a_number_too_large_for_a_float_is_a_400(ask):
    answer = ask("POST", "/v1/completions", content=b'{"prompt": "a", "temperature": 1e400}')
    assert error_of(answer, 400)["param"] in ("temperature", None)


def test_a_refusal_of_the_template_is_a_400(ask):
    class Strict(FakeFrontend):
        def render_chat(self, messages, **arguments):
            raise RequestError("messages: roles must alternate", field="messages")

    answer = ask("POST", "/v1/chat/completions", frontend=Strict(), json={"messages": [USER]})
    assert error_of(answer, 400)["param"] == "messages"


def test_neutral_values_of_unsupported_fields_and_unknown_fields_pass(ask, caplog):
    request = {
        "messages": [USER],
        "max_tokens": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "brand_new": 1,
    }
    assert ask("POST", "/v1/chat/completions", json=request).status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        "ignored the unknown request field 'brand_new'"
    ]


def test_the_content_type_does_not_matter(ask):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert ask("POST", "/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/v1/models/", "/v1/completions/"])
def test_an_unknown_path_is_a_404(ask, path):
    error_of(ask("GET", path), 404)


def test_a_wrong_method_is_a_405_that_names_the_right_one(ask):
    answer = ask("GET", "/v1/completions")
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_an_unknown_model_is_a_404_naming_the_served_ones(ask):
    error = error_of(ask("POST", "/v1/completions", json={"prompt": "a", "model": "gpt"}), 404)
    assert error["param"] == "model" and error["code"] == "model_not_found" and "'demo'" in error["message"]


def test_every_served_name_is_accepted_and_answered_with(ask):
    settings = ServerSettings(model="org/model", served_model_names=("one", "two"))
    for given, answered in (("two", "two"), (None, "one")):
        answer = ask("POST", "/v1/completions", settings=settings, json={"prompt": "a", "model": given})
        assert answer.json()["model"] == answered
    error_of(
        ask("POST", "/v1/completions", settings=settings, json={"prompt": "a", "model": "org/model"}), 404
    )


def test_a_dead_engine_is_a_503(ask):
    error = error_of(ask("POST", "/v1/completions", frontend=dead_frontend(), json={"prompt": "a"}), 503)
    assert error["code"] == "engine_dead"


def test_a_loading_server_is_a_503_with_retry_after(ask):
    answer = ask("POST", "/v1/chat/completions", loading=True, json={"messages": [USER]})
    assert error_of(answer, 503)["code"] == "loading" and answer.headers["retry-after"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic s3cret"}, 401),
        ({"Authorization": "s3cret"}, 401),
        ({"Authorization": b"Bearer s\xe9cret"}, 401),
        ({"Authorization": "Bearer s3cret"}, 200),
        ({"Authorization": "bearer s3cret"}, 200),
    ],
)
def test_the_key_is_asked_for(ask, headers, status):
    settings = ServerSettings(model="demo", api_key="s3cret")
    answer = ask("POST", "/v1/completions", settings=settings, headers=headers, json={"prompt": "a"})
    assert answer.status_code == status
    if status == 401:
        assert error_of(answer, 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 200), ("http://test", 200), ("http://evil.example", 403), ("null", 403), ("http://[", 403)],
)
def test_a_web_page_of_another_origin_is_refused_unless_it_has_a_key(ask, origin, status):
    headers = {} if origin is None else {"Origin": origin}
    assert ask("POST", "/v1/completions", headers=headers, json={"prompt": "a"}).status_code == status
    assert ask("GET", "/health", headers=headers).status_code == 200
    keyed = ServerSettings(model="demo", api_key="s3cret")
    headers["Authorization"] = "Bearer s3cret"
    answer = ask("POST", "/v1/completions", settings=keyed, headers=headers, json={"prompt": "a"})
    assert answer.status_code == 200


def test_without_the_key_bodies_and_paths_are_not_looked_at(ask):
    settings = ServerSettings(model="demo", api_key="s3cret")
    error_of(ask("POST", "/v1/completions", settings=settings, content=b"{"), 401)
    for path in ("/v1/nothing", "/v1", "/score", "/docs", "/openapi.json", "//health", "/health/", "/HEALTH"):
        error_of(ask("GET", path, settings=settings), 401)
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert ask("GET", path, settings=settings).status_code == 200
