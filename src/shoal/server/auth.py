"""The API key: every path under ``/v1`` asks for it, before the body is read. Knows no route."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.server.errors import Fault, fault_response

__all__ = ["RequireKey"]


class RequireKey:
    """ASGI middleware that answers 401 without ``Authorization: Bearer <key>``.

    Args:
        app: what is behind it.
        key: the key.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_guarded(scope["path"]) and not self._has_key(scope):
            fault = Fault(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await fault_response(fault)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key)
        return False


def _is_guarded(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")
