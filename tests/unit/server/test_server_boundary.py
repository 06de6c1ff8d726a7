"""Every answer has its request's id; no two requests of one id run at once; a branch's end is its own."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from server_fake import FakeFrontend, live_server

from shoal.server.settings import ServerSettings

ID = {"X-Request-Id": "mine/1"}
ASK = {"prompt": "a", "max_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_id_is_taken_and_told(ask, stream):
    answer = ask("POST", "/v1/completions", headers=ID, json={**ASK, "stream": stream})
    assert answer.headers["x-request-id"] == "mine/1"
    assert '"id":"cmpl-mine/1"' in answer.text


def test_without_one_an_id_is_drawn(ask):
    first, second = (ask("POST", "/v1/completions", json=ASK) for _ in range(2))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.json()["id"] == f"cmpl-{first.headers['x-request-id']}"


@pytest.mark.parametrize("value", ["", "a b", "a" * 129, "ä", "a\tb", "a\x7f"])
def test_what_is_no_id_is_refused_and_not_repeated(ask, value):
    answer = ask("POST", "/v1/completions", headers=[(b"x-request-id", value.encode())], json=ASK)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "bad_request_id"
    assert len(answer.headers["x-request-id"]) == 32


def test_refusals_have_it_too(ask):
    class Broken(FakeFrontend):
        def stats(self):
            raise OSError("secret")

    keyed = ServerSettings(model="demo", api_key="s3cret")
    for answer, status in (
        (ask("GET", "/nothing", headers=ID), 404),
        (ask("POST", "/v1/completions", headers=ID, json={}), 400),
        (ask("POST", "/v1/completions", headers=ID, settings=keyed), 401),
        (ask("GET", "/metrics", headers=ID, frontend=Broken()), 500),
    ):
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine/1")
        assert "secret" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_that_is_running_is_a_409_and_free_again_afterwards(stream):
    frontend = FakeFrontend(hang_after=1)
    with live_server(frontend) as url, httpx.Client(base_url=url, headers=ID) as client:
        answers: list[httpx.Response] = []

        def ask_first() -> None:
            answers.append(httpx.post(f"{url}/v1/completions", headers=ID, json={**ASK, "stream": stream}))

        thread = threading.Thread(target=ask_first)
        thread.start()
        assert frontend.hanging.wait(5)
        for path, prompt in (("completions", {"prompt": "b"}), ("chat/completions", {"messages": [
            {"role": "user", "content": "hi"}]})):  # fmt: skip
            refused = client.post(f"/v1/{path}", json={**prompt, "stream": stream})
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "duplicate_request_id"
        frontend.hang_after = None
        frontend.loop.call_soon_threadsafe(frontend.go_on.set)
        thread.join(5)
        assert answers[0].status_code == 200
        assert client.post("/v1/completions", json=ASK).status_code == 200


def test_an_aborted_requests_id_is_free_at_once():
    frontend = FakeFrontend(hang_after=1)
    with live_server(frontend) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", headers=ID, json=ASK, timeout=httpx.Timeout(5, read=0.2))
        assert frontend.abort_seen.wait(2)
        frontend.hang_after = None
        assert httpx.post(f"{url}/v1/completions", headers=ID, json=ASK).status_code == 200


def test_prompts_of_one_request_never_meet_another_requests_id(ask):
    ids = []

    class Recording(FakeFrontend):
        async def stream(self, prompt, params, request_id=None, **further):
            ids.append(request_id)
            async for delta in super().stream(prompt, params, request_id, **further):
                yield delta

    answer = ask(
        "POST", "/v1/completions", frontend=Recording(), headers=ID, json={**ASK, "prompt": ["a", "b"]}
    )
    assert answer.status_code == 200
    assert ids == ["cmpl-mine/1 0", "cmpl-mine/1 1"]  # clients' ids have no spaces


@pytest.mark.parametrize("stream", [False, True])
def test_a_branch_that_fails_leaves_the_others_alone(ask, stream):
    frontend = FakeFrontend()
    frontend.branch_error, frontend.failing_branches = "broke", {2}
    answer = ask("POST", "/v1/completions", frontend=frontend, json={**ASK, "n": 4, "stream": stream})
    assert answer.status_code == 200
    if stream:
        events = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")[:-1]]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
    else:
        choices = answer.json()["choices"]
    texts: dict[int, str] = {}
    for choice in choices:
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    reasons = {choice["index"]: choice["finish_reason"] for choice in choices}
    assert reasons == {0: "length", 1: "length", 2: "error", 3: "length"}
    assert [texts[index] for index in (0, 1, 3)] == ["00 01 02 ", "10 11 12 ", "30 31 32 "]


def test_if_every_branch_fails_the_request_does(ask):
    frontend = FakeFrontend()
    frontend.branch_error = "broke"
    answer = ask("POST", "/v1/completions", frontend=frontend, json={**ASK, "n": 3})
    assert answer.status_code == 500 and "broke" in answer.json()["error"]["message"]
