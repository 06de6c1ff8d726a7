"""The server as an ASGI app: routes, errors, the API key. Knows no engine but its protocol."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from shoal.engine.protocol import Frontend
from shoal.server.auth import RefuseForeignPages, RequireKey
from shoal.server.boundary import Boundary
from shoal.server.chat import create_chat_completion
from shoal.server.completions import create_completion
from shoal.server.embeddings import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    create_classification,
    create_embedding,
    create_rerank,
    create_score,
)
from shoal.server.errors import install_handlers
from shoal.server.models import get_health, get_metrics, get_model, get_ready, get_version, list_models
from shoal.server.schemas import ChatRequest, CheckedRequest, CompletionRequest
from shoal.server.settings import ServerSettings
from shoal.server.state import ServerState

__all__ = ["create_app"]


def create_app(frontend: Frontend | None, settings: ServerSettings) -> FastAPI:
    """An OpenAI-compatible app over ``frontend``.

    Args:
        frontend: the engine; None while it loads, then ``app.state.shoal.attach(frontend)``.
        settings: the server's options.
    """
    app = FastAPI(title="shoal", version=version("shoal"), redirect_slashes=False)
    state = app.state.shoal = ServerState(frontend, settings)
    install_handlers(app, state.metrics.count)
    if settings.api_key is not None:
        app.add_middleware(RequireKey, key=settings.api_key)
    else:
        app.add_middleware(RefuseForeignPages)
    app.add_middleware(Boundary, count=state.metrics.count)
    for path, generate, kind in (
        ("/v1/completions", create_completion, CompletionRequest),
        ("/v1/chat/completions", create_chat_completion, ChatRequest),
        ("/v1/embeddings", create_embedding, EmbeddingRequest),
        ("/classify", create_classification, ClassifyRequest),
        ("/score", create_score, ScoreRequest),
        ("/v1/score", create_score, ScoreRequest),
        ("/rerank", create_rerank, RerankRequest),
        ("/v1/rerank", create_rerank, RerankRequest),
    ):
        app.post(path, response_model=None, openapi_extra=_takes(kind))(generate)
    for path, get in (
        ("/v1/models", list_models),
        ("/v1/models/{model_id:path}", get_model),
        ("/health", get_health),
        ("/ready", get_ready),
        ("/version", get_version),
        ("/metrics", get_metrics),
    ):
        app.get(path, response_model=None)(get)
    return app


def _takes(kind: type[CheckedRequest]) -> dict[str, Any]:
    """The request body's schema, for ``/docs``: bodies are parsed by ``schemas.parse``, not by FastAPI."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
