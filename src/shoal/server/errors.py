"""From exceptions to OpenAI's error body: ``{"error": {message, type, param, code}}``. Knows no route.

| status | when |
|---|---|
| 400 | bad input; ``param`` names the field |
| 401 | the API key is missing or wrong |
| 403 | a web page of another origin asks |
| 404, 405 | no such path or model; a method the path does not have |
| 408, 413 | the body came too slowly; it is larger than ``--max-body-bytes`` |
| 409 | a request with the same ``X-Request-Id`` is running |
| 429 | the waiting queue is full; ``Retry-After`` in seconds, from how fast it has moved |
| 500 | the request failed while running |
| 503 | loading, draining, too many connections, or the engine has given up |
| 504 | the request's ``timeout``, or ``--request-timeout``, passed |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shoal.errors import EngineDeadError, QueueFullError, ShoalError, UsageError

__all__ = [
    "ClientGone",
    "Fault",
    "error_body",
    "fault_of",
    "fault_response",
    "install_handlers",
    "json_response",
]

_log = logging.getLogger("shoal.server")

_MOST_CHARACTERS = 1000  # of a message: some repeat what the client sent


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer."""


class Fault(Exception):
    """A refusal or failure as the client will see it.

    Args:
        status: HTTP status.
        message: what is wrong and how to put it right.
        kind: OpenAI's ``type``.
        param: the request field at fault.
        code: a short word for programs.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MOST_CHARACTERS else f"{message[:_MOST_CHARACTERS]}…"
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def reason(self) -> str:
        """A word for counters."""
        return self.code or "invalid_request"


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``content`` as JSON."""
    return Response(
        msgspec.json.encode(content), status_code=status, headers=headers, media_type="application/json"
    )


def fault_of(error: Exception) -> Fault:
    """How ``error`` is told to the client. What shoal did not raise on purpose is logged, not shown."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, UsageError):
        return Fault(400, str(error), param=error.field)
    if isinstance(error, QueueFullError):
        seconds = max(1, math.ceil(error.retry_after_s))
        return Fault(
            429, str(error), kind="rate_limit_error", code="queue_full", headers={"Retry-After": str(seconds)}
        )
    if isinstance(error, EngineDeadError):
        return Fault(503, str(error), kind="server_error", code="engine_dead")
    if isinstance(error, ShoalError):
        return Fault(500, str(error), kind="server_error", code="engine_error")
    _log.error("a request failed unexpectedly", exc_info=error)
    return Fault(500, f"internal error ({type(error).__name__})", kind="server_error", code="internal_error")


def error_body(fault: Fault) -> dict[str, Any]:
    """OpenAI's error body."""
    return {"error": {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}}


def fault_response(fault: Fault) -> Response:
    """The whole HTTP answer to a fault."""
    return json_response(error_body(fault), fault.status, fault.headers)


def _http_fault(request: Request, error: HTTPException) -> Fault:
    path = request.url.path
    if error.status_code == 404:
        return Fault(404, f"no such path: {request.method} {path}", code="not_found", headers=error.headers)
    if error.status_code == 405:
        message = f"{path} does not take {request.method}"
        return Fault(405, message, code="method_not_allowed", headers=error.headers)
    return Fault(error.status_code, str(error.detail), headers=error.headers)


def install_handlers(app: FastAPI, count: Callable[[str], None]) -> None:
    """Answer the expected exceptions of ``app`` with OpenAI's body. (The rest is ``Boundary``'s.)

    Args:
        app: gets the handlers.
        count: called with the reason of each answer, and ``client_gone``.
    """

    async def answer_error(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            count("client_gone")
            return Response(status_code=499)  # nginx's number for it; seen by the access log alone
        fault = _http_fault(request, error) if isinstance(error, HTTPException) else fault_of(error)
        count(fault.reason)
        return fault_response(fault)

    for kind in (ClientGone, Fault, ShoalError, HTTPException):
        app.add_exception_handler(kind, answer_error)
