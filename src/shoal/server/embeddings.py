"""``/v1/embeddings`` as OpenAI has it; ``/classify``, ``/score`` and ``/rerank`` as vLLM has them. Knows an
engine by its protocol, and its answers by their names.
"""

from __future__ import annotations

import array
import base64
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from shoal.errors import RequestError
from shoal.server.body import read_body
from shoal.server.boundary import request_id_of
from shoal.server.completions import split_prompts
from shoal.server.errors import json_response
from shoal.server.schemas import CheckedRequest
from shoal.server.state import state_of
from shoal.server.waiting import Deadline, while_connected

__all__ = [
    "ClassifyRequest",
    "EmbeddingRequest",
    "RerankRequest",
    "ScoreRequest",
    "create_classification",
    "create_embedding",
    "create_rerank",
    "create_score",
]

_MOST_TEXTS = 2048  # OpenAI's limit


class EncodeRequest(CheckedRequest):
    """What all have in common."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # seconds from arrival


class EmbeddingRequest(EncodeRequest):
    """Body of ``POST /v1/embeddings``."""

    input: Any  # text, token ids, or a list of either
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool | None = None  # None: as the model's files say
    pooling: Literal["mean", "cls", "last"] | None = None


class ClassifyRequest(EncodeRequest):
    """Body of ``POST /classify``."""

    input: Any


class ScoreRequest(EncodeRequest):
    """Body of ``POST /score``."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankRequest(EncodeRequest):
    """Body of ``POST /rerank``."""

    query: str
    documents: list[str]
    top_n: int = Field(default=0, ge=0)  # 0: all


async def create_embedding(request: Request) -> Response:
    """A vector for each text."""
    deadline = Deadline(state_of(request).settings.request_timeout_s)
    body = await read_body(request, EmbeddingRequest)
    texts = _texts(body.input)
    found = await _encoded(
        request,
        body,
        deadline,
        lambda tasks: tasks.embed(
            texts, body.pooling, body.normalize, body.dimensions, body.truncate_prompt_tokens
        ),
    )
    is_base64 = body.encoding_format == "base64"
    data = []
    for index, output in enumerate(found):
        vector = output.outputs.embedding
        data.append(
            {"object": "embedding", "index": index, "embedding": _base64(vector) if is_base64 else vector}
        )
    return _listed(request, body, "embd", data, found)


async def create_classification(request: Request) -> Response:
    """The classes of each text."""
    deadline = Deadline(state_of(request).settings.request_timeout_s)
    body = await read_body(request, ClassifyRequest)
    texts = _texts(body.input)
    found = await _encoded(
        request, body, deadline, lambda tasks: tasks.classify(texts, body.truncate_prompt_tokens)
    )
    data = []
    for index, output in enumerate(found):
        own = output.outputs
        label = own.label if hasattr(own, "label") else own.labels
        num_classes = len(own.probs if hasattr(own, "label") else own.probs[0])
        data.append({"index": index, "label": label, "probs": own.probs, "num_classes": num_classes})
    return _listed(request, body, "classify", data, found)


async def create_score(request: Request) -> Response:
    """How well pairs of texts go together."""
    deadline = Deadline(state_of(request).settings.request_timeout_s)
    body = await read_body(request, ScoreRequest)
    for name, texts in (("text_1", body.text_1), ("text_2", body.text_2)):
        _check_count(texts, name)
    found = await _encoded(
        request,
        body,
        deadline,
        lambda tasks: tasks.score(body.text_1, body.text_2, body.truncate_prompt_tokens),
    )
    data = [{"index": i, "object": "score", "score": one.outputs.score} for i, one in enumerate(found)]
    return _listed(request, body, "score", data, found)


async def create_rerank(request: Request) -> Response:
    """Documents by how well they go with a query, the best first."""
    deadline = Deadline(state_of(request).settings.request_timeout_s)
    body = await read_body(request, RerankRequest)
    _check_count(body.documents, "documents")
    found = await _encoded(
        request,
        body,
        deadline,
        lambda tasks: tasks.score(body.query, body.documents, body.truncate_prompt_tokens),
    )
    order = sorted(range(len(found)), key=lambda index: -found[index].outputs.score)
    results = [
        {
            "index": index,
            "document": {"text": body.documents[index]},
            "relevance_score": found[index].outputs.score,
        }
        for index in order[: body.top_n or len(order)]
    ]
    return json_response(
        {
            "id": f"rerank-{request_id_of(request)}",
            "model": state_of(request).model_name(body.model),
            "usage": {"total_tokens": _num_tokens(found)},
            "results": results,
        }
    )


async def _encoded(
    request: Request, body: EncodeRequest, deadline: Deadline, make: Callable[[Any], Any]
) -> Sequence[Any]:
    """What the engine makes of a job."""
    state = state_of(request)
    deadline.shorten(body.timeout)
    state.model_name(body.model)
    timer = state.metrics.timer()
    found: Sequence[Any] = await while_connected(request.receive, state.serving().encode(make), deadline)
    timer.finished(_num_tokens(found))
    return found


def _texts(given: Any) -> list[str | list[int]]:
    try:
        return split_prompts(given)
    except RequestError as error:
        raise RequestError(str(error).replace("prompt", "input"), field="input") from None


def _check_count(texts: str | Sequence[str], field: str) -> None:
    if not texts:
        raise RequestError(f"{field}: must not be empty", field=field)
    if not isinstance(texts, str) and len(texts) > _MOST_TEXTS:
        raise RequestError(f"{field}: at most {_MOST_TEXTS} texts, got {len(texts)}", field=field)


def _listed(
    request: Request, body: EncodeRequest, prefix: str, data: list[dict[str, Any]], found: Sequence[Any]
) -> Response:
    tokens = _num_tokens(found)
    return json_response(
        {
            "id": f"{prefix}-{request_id_of(request)}",
            "object": "list",
            "created": int(time.time()),
            "model": state_of(request).model_name(body.model),
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _num_tokens(found: Sequence[Any]) -> int:
    return sum(len(output.prompt_token_ids) for output in found)


def _base64(vector: Sequence[float]) -> str:
    """float32, little-endian, as OpenAI's clients read it."""
    numbers = array.array("f", vector)
    return base64.b64encode(numbers.tobytes()).decode()
