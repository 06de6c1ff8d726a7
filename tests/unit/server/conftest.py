"""Asking an app without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from server_fake import SETTINGS, FakeFrontend

from shoal.server.app import create_app
from shoal.server.settings import ServerSettings

Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask() -> Ask:
    """``ask(method, path, frontend=..., settings=..., **httpx arguments)``: one answer, whole."""

    def ask_once(
        method: str,
        path: str,
        *,
        frontend: FakeFrontend | None = None,
        settings: ServerSettings = SETTINGS,
        loading: bool = False,
        **arguments: Any,
    ) -> httpx.Response:
        async def asked() -> httpx.Response:
            engine = None if loading else (frontend or FakeFrontend())
            transport = httpx.ASGITransport(create_app(engine, settings))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(asked())

    return ask_once
