"""``shoal serve demo -tp 2`` under the official client: answers, refusals, disconnects and its end."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from support.programs import Server, are_gone, shared_memory, wait_until

pytestmark = [pytest.mark.demo, pytest.mark.usefixtures("demo_path")]

OPTIONS = ["demo", "-tp", "2", "--kv-cache-memory-bytes", str(128 << 20), "--max-model-len", "512"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_path: Path) -> Iterator[Server]:
    server = Server(*OPTIONS, log=tmp_path_factory.mktemp("serve") / "log")
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def gauge(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = [line.split()[-1] for line in lines if line.startswith(f"shoal:{name}")]
    return float(values[0])


def test_completions_equal_the_reference(client: openai.OpenAI, workload: list[dict[str, Any]]) -> None:
    prompt = min(workload, key=lambda p: p["n"])
    out = client.completions.create(
        model="demo",
        prompt=prompt["ids"],
        temperature=0,
        max_tokens=16,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    from transformers import AutoTokenizer

    from shoal.checkpoint.source import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve("demo"))
    assert out.choices[0].text == tokenizer.decode(prompt["expected"][:16])
    assert out.usage is not None
    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (prompt["n"], 16)
    assert out.choices[0].finish_reason == "length"


def test_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Name three fish."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.chat.completions.create(**ask).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**ask, stream=True)
        if chunk.choices
    ]
    assert whole
    assert "".join(pieces) == whole
    assert len(pieces) > 3


def test_a_stream_ends_in_done(server: Server) -> None:
    body = {"model": "demo", "prompt": "One, two,", "max_tokens": 4, "stream": True, "temperature": 0}
    lines = [
        line
        for line in httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).iter_lines()
        if line
    ]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"]


def test_n_seed_and_logprobs(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "demo",
        "prompt": "Once",
        "n": 3,
        "seed": 7,
        "max_tokens": 8,
        "logprobs": 2,
    }
    first, second = (client.completions.create(**ask) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    logprobs = first.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 8
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)


def test_many_requests_share_the_batch(client: openai.OpenAI, server: Server) -> None:
    answers: list[str] = []

    def ask(number: int) -> None:
        out = client.completions.create(
            model="demo", prompt=f"{number} plus one is", temperature=0, max_tokens=24
        )
        answers.append(out.choices[0].text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    peak = 0.0
    while any(thread.is_alive() for thread in threads):
        peak = max(peak, gauge(server, "num_requests_running"))
    assert len(answers) == 8
    assert peak > 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": "word " * 600}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_a_400_that_names_the_field_and_the_next_request_is_fine(
    change: dict[str, Any], field: str, server: Server
) -> None:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 2, "temperature": 0}
    refused = httpx.post(f"{server.url}/v1/completions", json={**body, **change}, timeout=60)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nosuch"):
        client.completions.create(model="nosuch", prompt="Hello")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_a_second(server: Server, stream: bool) -> None:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 400, "stream": stream, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=httpx.Timeout(60, read=1.5)) as client:
        if stream:
            with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # dropped, it would hang up at once
                next(lines)
                wait_until(lambda: gauge(server, "num_requests_running") == 1, 1.5, "the request runs")
                raise httpx.ReadTimeout("the client has seen enough")
        client.post(f"{server.url}/v1/completions", json=body)
    wait_until(lambda: gauge(server, "num_requests_running") == 0, 1.5, "the request is aborted")
    assert gauge(server, "kv_cache_usage_perc") == 0


def test_models_health_ready_and_metrics(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    for path in ("health", "ready", "metrics"):
        assert httpx.get(f"{server.url}/{path}").status_code == 200


def test_nothing_but_the_http_port_listens_beyond_loopback(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    listening = [
        connection.laddr
        for member in (process, *process.children(recursive=True))
        for connection in member.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert server.port in {address.port for address in listening}
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}


def test_a_running_id_is_a_409_and_free_as_soon_as_its_client_has_left(server: Server) -> None:
    headers = {"X-Request-Id": "e2e-1"}
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    with httpx.Client(timeout=60, headers=headers) as client:
        with client.stream("POST", url, json=body) as answer:
            lines = answer.iter_lines()  # dropped, it would hang up at once
            assert json.loads(next(lines).removeprefix("data: "))["id"] == "cmpl-e2e-1"
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 409
        wait_until(lambda: gauge(server, "num_requests_running") == 0, 5, "the request is aborted")
        again = client.post(url, json={**body, "stream": False, "max_tokens": 2})
    assert again.status_code == 200 and again.headers["x-request-id"] == "e2e-1"


def test_a_timeout_ends_the_request_and_frees_its_blocks(server: Server) -> None:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "timeout": 0.3}
    for stream in (False, True):
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": stream}, timeout=60)
        assert answer.status_code in ((200, 504) if stream else (504,))
        assert '"code":"request_timeout"' in answer.text
    wait_until(lambda: gauge(server, "num_requests_running") == 0, 5, "both are gone")
    assert gauge(server, "kv_cache_usage_perc") == 0


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    server = Server(*OPTIONS, "--shutdown-timeout", "60", log=tmp_path / "log")
    ranks = server.ranks()
    assert len(ranks) == 2
    answers: list[httpx.Response] = []
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=120))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: gauge(server, "num_requests_running") == 1, 60, "the request runs", poll_s=0.01)
    assert server.stop() == 0, server.log.read_text()
    thread.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 60
    wait_until(lambda: are_gone(ranks), 5, "no rank is left")


@pytest.mark.slow
def test_sigkill_of_the_server_leaves_nothing(tmp_path: Path) -> None:
    before = shared_memory()
    server = Server(*OPTIONS, log=tmp_path / "log")
    ranks = server.ranks()
    assert len(ranks) == 2
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    wait_until(lambda: are_gone(ranks), 5, "no rank is left")
    assert shared_memory() <= before
