"""Over a real socket: the official client, and clients that leave."""

from __future__ import annotations

import socket
from dataclasses import replace

import httpx
import openai
import pytest
from server_fake import SETTINGS, FakeFrontend, live_server

from shoal.errors import QueueFullError

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def frontend():
    return FakeFrontend()


@pytest.fixture(scope="module")
def client(frontend):
    with (
        live_server(frontend) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def test_the_client_reads_a_completion_with_logprobs(client):
    completion = client.completions.create(model="demo", prompt=["a", "b"], n=2, max_tokens=2, logprobs=2)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.choices[1].text == "10 11 "
    logprobs = completion.choices[0].logprobs
    assert logprobs.tokens == ["00 ", "01 "] and logprobs.token_logprobs == [-1.0, -1.0]
    assert logprobs.top_logprobs[0] == {"00 ": -1.0, "best": -0.5}
    assert completion.usage.completion_tokens == 8


def test_the_client_reads_a_chat_with_logprobs(client):
    chat = client.chat.completions.create(
        model="demo", messages=USER, max_tokens=3, logprobs=True, top_logprobs=1, stop=["02"]
    )
    [choice] = chat.choices
    assert (choice.message.content, choice.finish_reason) == ("00 01 ", "stop")
    assert choice.logprobs.content[0].token == "00 "
    assert choice.logprobs.content[0].top_logprobs[0].token == "best"


def test_the_client_reads_a_chat_stream(client):
    stream = client.chat.completions.create(
        model="demo", messages=USER, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "00 01 02 "
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3


def test_the_client_reads_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_the_client_raises_its_own_exceptions(client, frontend):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=USER, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found"
    frontend.refusal = QueueFullError("full")
    try:
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="demo", prompt="a")
    finally:
        frontend.refusal = None
    frontend.branch_error = "broke"
    try:
        with pytest.raises(openai.APIError, match="broke"):
            list(client.completions.create(model="demo", prompt="a", stream=True))
    finally:
        frontend.branch_error = None


def test_a_wrong_key_is_an_authentication_error():
    with (
        live_server(FakeFrontend(), replace(SETTINGS, api_key="right")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 2])
def test_a_client_that_leaves_aborts_its_request(path, stream, hang_after):
    """Within a second, before the first token and between tokens, streaming or not."""
    frontend = FakeFrontend(hang_after=hang_after)
    prompt = {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": USER}
    with live_server(frontend) as url:
        host, port = url.removeprefix("http://").split(":")
        body = httpx.Request("POST", url, json={**prompt, "max_tokens": 9, "stream": stream}).read()
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert frontend.hanging.wait(5)
        assert frontend.abort_seen.wait(1)
        assert httpx.get(f"{url}/health").status_code == 200
    assert not frontend.running and len(frontend.aborted) == len(frontend.seen)
