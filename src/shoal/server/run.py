"""A server from start to end: bind, load, serve, drain, stop. Knows no engine but its protocol.

The port is bound first, so that a port in use costs no load. While the engine loads, ``/health`` is
200 and ``/ready`` 503. The first SIGTERM or SIGINT turns readiness off and lets running requests
finish; a second ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from shoal.engine.protocol import Frontend
from shoal.errors import ConfigError, EngineDeadError, EngineError
from shoal.server.app import create_app
from shoal.server.connections import allow_descriptors, limited
from shoal.server.settings import ServerSettings
from shoal.server.state import ServerState
from shoal.server.waiting import cancelled

__all__ = ["bind", "http_config", "serve"]

_log = logging.getLogger("shoal.server")

_LAST_BYTES_TIMEOUT_S = 5  # for answers still being sent when the engine has stopped
_KEEP_ALIVE_S = 30  # longer than clients' pools keep a connection, which find it closed otherwise
_BACKLOG = 2048  # connections that may wait to be taken
_TAKEN_AT_ONCE = 8


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the first signal must drain the engine before HTTP stops.

    asyncio takes as many connections at a time as it lets wait. Hundreds at a time are hundreds of requests
    read and begun in a row, and nobody else is answered meanwhile: few are taken, and many may wait.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the host or port cannot be used here.
        EngineError: another program listens there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"host: {host!r} cannot be resolved: {error}", field="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except PermissionError:
        listener.close()
        raise ConfigError(
            f"port: not allowed to bind port {port}; choose one above 1023", field="port"
        ) from None
    except OSError as error:
        listener.close()
        raise EngineError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port"
        ) from None
    return listener


def http_config(app: FastAPI, protocol: type[asyncio.Protocol], settings: ServerSettings) -> uvicorn.Config:
    """How uvicorn serves ``app``."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=settings.access_log,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        backlog=_TAKEN_AT_ONCE,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_BYTES_TIMEOUT_S,
    )


async def serve(settings: ServerSettings, start_frontend: Callable[[], Awaitable[Frontend]]) -> bool:
    """Serve until a signal comes.

    Args:
        settings: the server's options.
        start_frontend: loads the engine. It must leave the event loop free, so that ``/health``
            answers meanwhile, and clean up when cancelled.

    Returns:
        whether the engine had loaded when the signal came.

    Raises:
        ConfigError, EngineError: as :func:`bind`; and whatever ``start_frontend`` raises.
        EngineDeadError: the engine gave up while it served.
    """
    listener = bind(settings.host, settings.port)
    url = _url(listener)
    _log.info("listening on %s, loading %s", url, settings.model)
    app = create_app(None, settings)
    state: ServerState = app.state.shoal
    server = _Server(http_config(app, limited(allow_descriptors(settings.max_connections)), settings))
    http = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        with _stop_signals() as stop:
            await _load_and_serve(state, start_frontend, stop, http, url)
    finally:
        server.should_exit = True
        await http
    _log.info("stopped")
    return state.frontend is not None


async def _load_and_serve(
    state: ServerState,
    start_frontend: Callable[[], Awaitable[Frontend]],
    stop: asyncio.Event,
    http: asyncio.Task[None],
    url: str,
) -> None:
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.ensure_future(start_frontend())
    try:
        await asyncio.wait({loading, stopping, http}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            _log.info("stopped while loading")
            return
        frontend = loading.result()
        state.attach(frontend)
        _log.info("ready: %s at %s/v1", ", ".join(state.settings.names), url)
        await _stopped(frontend, {stopping, http}, state.settings.keep_alive_on_failure)
        state.drain()
        timeout_s = state.settings.shutdown_timeout_s
        _log.info(
            "stopping: running requests have %g seconds to finish; a second signal ends at once", timeout_s
        )
        await frontend.shutdown(timeout_s)
    finally:
        state.drain()
        await cancelled(loading, stopping)


async def _stopped(frontend: Frontend, stops: set[asyncio.Task[Any]], keep_alive: bool) -> None:
    """Wait for one of ``stops``.

    Args:
        keep_alive: stay, with ``/health`` at 503, when the engine gives up.

    Raises:
        EngineDeadError: the engine gave up.
    """
    dying = asyncio.create_task(frontend.died())
    try:
        await asyncio.wait({*stops, dying}, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            if not keep_alive:
                raise EngineDeadError(dying.result())
            _log.error("%s; staying, but serving nothing (keep_alive_on_failure)", dying.result())
            await asyncio.wait(stops, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(dying)


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """An event set by the first SIGTERM or SIGINT; the second has the system's effect."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            _log.warning("%s again: ending at once", number.name)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.set()

    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
