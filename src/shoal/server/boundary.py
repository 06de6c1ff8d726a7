"""What goes for every request, whatever its route: an id, and an answer where the route has none.

``X-Request-Id`` is taken from the client or drawn here, and told with every answer. An id is visible ASCII,
so that it is safe in headers and log lines. That no two requests of one id run at the same time is for those
who run them (``ServerState.claim``). Knows no route but those that are open to all.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.errors import Fault, fault_of, fault_response

__all__ = ["CROWDED", "Boundary", "is_guarded", "request_id_of"]

CROWDED = "shoal.crowded"
"""Key in a scope's ``state``: true for a connection beyond ``--max-connections``."""

_OPEN = frozenset({"/health", "/ready", "/version", "/metrics"})
_HEADER = "X-Request-Id"
_KEY = "shoal.request_id"
_ALLOWED = re.compile(rb"[!-~]{1,128}")


class Boundary:
    """ASGI middleware around everything else.

    Args:
        app: what is behind it.
        count: called with the reason of each answer that is given here.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        is_refused = given is not None and not _ALLOWED.fullmatch(given)
        request_id = uuid.uuid4().hex if given is None or is_refused else given.decode("ascii")
        scope[_KEY] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        try:
            if is_refused:
                message = f"{_HEADER}: must be 1 to 128 visible ASCII characters without spaces"
                raise Fault(400, message, code="bad_request_id")
            if scope.get("state", {}).get(CROWDED) and is_guarded(scope["path"]):
                raise _crowded()
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # whatever it is, the client gets an answer; it is logged by fault_of
            fault = fault_of(error)
            self._count(fault.reason)
            if has_started:
                raise
            await fault_response(fault)(scope, receive, send_with_id)


def is_guarded(path: str) -> bool:
    """Whether a path is for those who may ask, and only as long as there are not too many of them."""
    return path not in _OPEN


def _crowded() -> Fault:
    headers = {"Retry-After": "1", "Connection": "close"}
    message = "there are too many connections (--max-connections)"
    return Fault(503, message, kind="server_error", code="too_many_connections", headers=headers)


def request_id_of(request: Request) -> str:
    """The id of a request that came through :class:`Boundary`."""
    return str(request.scope[_KEY])
