"""What a server says of itself: models, health, readiness, metrics."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_fake import SETTINGS, FakeFrontend, dead_frontend

from shoal.server.app import create_app
from shoal.server.settings import ServerSettings


def test_models_are_listed_under_every_name(ask):
    settings = ServerSettings(model="org/model", served_model_names=("one", "two/three"))
    listed = ask("GET", "/v1/models", settings=settings).json()
    assert listed["object"] == "list"
    assert [(m["id"], m["object"], m["root"], m["max_model_len"]) for m in listed["data"]] == [
        ("one", "model", "org/model", 64),
        ("two/three", "model", "org/model", 64),
    ]
    assert ask("GET", "/v1/models/two/three", settings=settings).json()["id"] == "two/three"
    assert ask("GET", "/v1/models/four", settings=settings).status_code == 404


@pytest.mark.parametrize(
    ("ready", "alive", "statuses"),
    [(True, True, (200, 200)), (False, True, (200, 503)), (False, False, (503, 503))],
)
def test_health_outlasts_readiness(ask, ready, alive, statuses):
    frontend = dead_frontend() if not alive else FakeFrontend()
    frontend.is_ready = ready
    assert (
        tuple(ask("GET", path, frontend=frontend).status_code for path in ("/health", "/ready")) == statuses
    )


def test_while_loading_it_is_alive_but_not_ready(ask):
    assert ask("GET", "/health", loading=True).status_code == 200
    assert ask("GET", "/ready", loading=True).json() == {"status": "loading"}
    assert ask("GET", "/v1/models", loading=True).json()["data"][0]["max_model_len"] is None
    assert ask("GET", "/metrics", loading=True).status_code == 200


def test_a_draining_app_refuses_but_is_alive():
    async def statuses() -> list[int]:
        app = create_app(FakeFrontend(), SETTINGS)
        app.state.shoal.drain()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            answers = [await client.get(path) for path in ("/health", "/ready")]
            answers.append(await client.post("/v1/completions", json={"prompt": "a"}))
        return [answer.status_code for answer in answers]

    assert asyncio.run(statuses()) == [200, 503, 503]


def test_version_and_openapi_are_served(ask):
    assert ask("GET", "/version").json() == {"version": version("shoal")}
    paths = ask("GET", "/openapi.json").json()["paths"]
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "max_tokens" in schema["properties"]


def test_metrics_have_vllm_names_and_count(ask):
    async def scraped() -> str:
        frontend = FakeFrontend()
        frontend.totals.kv_cache_usage = 0.25
        frontend.totals.kv_cache_window_usage = 0.5
        app = create_app(frontend, SETTINGS)
        create_app(frontend, SETTINGS)  # a second app in the process keeps its own numbers
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "n": 2})
            answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return answer.text

    samples = {}
    for family in text_string_to_metric_families(asyncio.run(scraped())):
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo"
            rest = {name: value for name, value in sample.labels.items() if name != "model_name"}
            samples[(sample.name, *rest.values())] = sample.value
    for name in (
        "num_requests_running", "num_requests_waiting", "prompt_tokens_total", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "num_preemptions_total",
    ):  # fmt: skip
        assert samples[(f"shoal:{name}",)] == 0
    assert samples[("shoal:kv_cache_usage_perc",)] == 0.25
    assert samples[("shoal:kv_cache_window_usage_perc",)] == 0.5
    assert samples[("shoal:generation_tokens_total",)] == 10
    assert samples[("shoal:request_success_total", "length")] == 1
    assert samples[("shoal:time_to_first_token_seconds_count",)] == 1
    assert samples[("shoal:inter_token_latency_seconds_count",)] == 8
    assert samples[("shoal:e2e_request_latency_seconds_count",)] == 1
    assert samples[("shoal:request_prompt_tokens_sum",)] == 3
    assert samples[("shoal:request_generation_tokens_sum",)] == 10
