"""``GET /v1/models``, ``/health``, ``/ready``, ``/version``, ``/metrics``: what a server says of itself."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shoal.metrics import METRICS_CONTENT_TYPE
from shoal.server.errors import json_response
from shoal.server.state import ServerState, state_of

__all__ = ["get_health", "get_metrics", "get_model", "get_ready", "get_version", "list_models"]


def _model(state: ServerState, name: str) -> dict[str, Any]:
    loaded = state.frontend
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "shoal",
        "root": state.settings.model,
        "parent": None,
        "max_model_len": None if loaded is None else loaded.info.max_model_len,
    }


async def list_models(request: Request) -> Response:
    """The served model, under each of its names."""
    state = state_of(request)
    return json_response({"object": "list", "data": [_model(state, name) for name in state.settings.names]})


async def get_model(request: Request) -> Response:
    """One model."""
    state = state_of(request)
    return json_response(_model(state, state.model_name(request.path_params["model_id"])))


async def get_health(request: Request) -> Response:
    """200 as long as the server can serve again without a restart; 503 once the engine has given up."""
    if state_of(request).is_alive:
        return json_response({"status": "ok"})
    return json_response({"status": "dead"}, 503)


async def get_ready(request: Request) -> Response:
    """200 while requests are served; 503 while loading, recovering or draining."""
    state = state_of(request)
    if state.is_ready:
        return json_response({"status": "ready"})
    if state.draining:
        status = "draining"
    elif state.frontend is None:
        status = "loading"
    else:
        status = "recovering" if state.is_alive else "dead"
    return json_response({"status": status}, 503)


async def get_version(request: Request) -> Response:
    """shoal's version."""
    return json_response({"version": version("shoal")})


async def get_metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(state_of(request).metrics.exposition(), media_type=METRICS_CONTENT_TYPE)
