"""Who may ask: who has the API key; without a key, anyone but another site's web page. Knows no route.

Refusals come before the body is read. A browser sends a cross-origin POST of plain text without asking the
server first, from any page that a user of this machine opens: the page could not read the answer, but it
could keep the model busy.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.server.boundary import is_guarded
from shoal.server.errors import Fault

__all__ = ["RefuseForeignPages", "RequireKey"]


class RequireKey:
    """ASGI middleware: 401 without ``Authorization: Bearer <key>``, but for ``/health`` and its like.

    Args:
        app: what is behind it.
        key: the key.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_guarded(scope["path"]) and not self._has_key(scope):
            raise Fault(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key)


class RefuseForeignPages:
    """ASGI middleware: 403 to web pages of another origin, but for ``/health`` and its like.

    Args:
        app: what is behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_guarded(scope["path"]):
            origin = _header(scope, b"origin")
            if origin is not None and origin.partition(b"://")[2] != _header(scope, b"host"):
                message = "web pages of another origin are not served; with --api-key, whoever has the key is"
                raise Fault(403, message, code="foreign_origin")
        await self._app(scope, receive, send)


def _header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that name."""
    value: bytes | None = next((value for key, value in scope["headers"] if key == name), None)
    return value
