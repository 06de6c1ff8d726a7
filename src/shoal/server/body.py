"""Reading a request's body: how large it may be, and how long it may take."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from shoal.server.errors import ClientGone, Fault
from shoal.server.schemas import CheckedRequest, parse
from shoal.server.state import state_of
from shoal.server.unsupported import unknown_fields

__all__ = ["BODY_TIMEOUT_S", "read_body"]

BODY_TIMEOUT_S = 60.0  # for the whole body

_CLOSE = {"Connection": "close"}  # what is left of the body is not worth reading

Request_ = TypeVar("Request_", bound=CheckedRequest)


async def read_body(request: Request, kind: type[Request_]) -> Request_:
    """The checked body of ``request``; fields that it has and shoal does not know are warned of.

    The body is read as JSON whatever its Content-Type says.

    Raises:
        ClientGone: the client left while sending.
        Fault: the body is too large (413) or too slow (408).
        RequestError: as :func:`shoal.server.schemas.parse`.
    """
    state = state_of(request)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await _read(request, state.settings.max_body_bytes)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds"
        raise Fault(408, message, code="body_timeout", headers=_CLOSE) from None
    parsed = parse(kind, data)
    state.warn_ignored(unknown_fields(parsed.model_extra or ()))
    return parsed


async def _read(request: Request, most: int) -> bytes:
    """The whole body, or a refusal.

    Of a body that is too large the rest is read too, and dropped: a client that is still sending would
    find its connection reset instead of the answer. One that asks first (``Expect: 100-continue``) is
    answered at once.
    """
    too_large = Fault(
        413, f"the body is larger than {most} bytes (--max-body-bytes)", code="body_too_large", headers=_CLOSE
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most and "expect" in request.headers:
        raise too_large
    body = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            body.clear()
        else:
            body += chunk
    if size > most:
        raise too_large
    return bytes(body)
