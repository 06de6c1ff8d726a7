"""``shoal serve``: an OpenAI-compatible server. Knows options and their order, not how a server works."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from shoal.cli.flags import taking
from shoal.cli.options import COMMON, ENGINE, QUEUE, SERVER, engine_options, set_up_logs
from shoal.config import EngineConfig, make_config
from shoal.engine.protocol import Frontend
from shoal.process.heap import settle

__all__ = ["app", "serve"]

app = typer.Typer(add_completion=False)

_log = logging.getLogger("shoal.server")

_SETTING_NAMES = {  # flag -> field of ServerSettings
    "host": "host",
    "port": "port",
    "api_key": "api_key",
    "keep_alive_on_failure": "keep_alive_on_failure",
    "max_body_bytes": "max_body_bytes",
    "max_connections": "max_connections",
    "request_timeout": "request_timeout_s",
    "shutdown_timeout": "shutdown_timeout_s",
}


@app.command()
@taking(SERVER, ENGINE, COMMON)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, folder, .gguf file or demo.", envvar="SHOAL_MODEL", metavar="MODEL"),
    ] = None,
    *,
    options: Mapping[str, Any],
) -> None:
    """Serve a model to OpenAI's clients."""
    set_up_logs(options)
    _share_handlers_with_uvicorn()
    if model is None:
        model = "demo"
        _log.info("no model named: serving demo")
    config = make_config(model=model, **{**QUEUE, **engine_options(options)})
    run_server(config, options, _start_engine)


def run_server(
    config: EngineConfig, options: Mapping[str, Any], start: Callable[[EngineConfig], Awaitable[Frontend]]
) -> None:
    """Serve until a signal comes.

    Args:
        config: of the engine.
        options: the flags set.
        start: loads the engine.
    """
    from shoal.server.run import serve as serve_until_stopped
    from shoal.server.settings import ServerSettings

    settings = ServerSettings(
        model=config.model,
        served_model_names=tuple(options.get("served_model_name", ())),
        access_log=options.get("log_level") == "debug",
        **{field: options[flag] for flag, field in _SETTING_NAMES.items() if flag in options},
    )

    async def run() -> None:
        if not await serve_until_stopped(settings, lambda: start(config)):
            # A thread that loads cannot be interrupted and would be waited for; ranks die with us.
            sys.stderr.flush()
            os._exit(0)

    asyncio.run(run())


async def _start_engine(config: EngineConfig) -> Frontend:
    # Importing torch takes seconds, during which /health must answer.
    front = await asyncio.to_thread(import_module, "shoal.engine.front")
    engine: Frontend = await front.AsyncLLM.start(config=config)
    settle()
    return engine


def _share_handlers_with_uvicorn() -> None:
    """uvicorn's log lines look like ours."""
    ours = logging.getLogger("shoal")
    theirs = logging.getLogger("uvicorn")
    theirs.handlers[:] = ours.handlers
    theirs.propagate = False
    theirs.setLevel(logging.INFO if ours.level <= logging.DEBUG else logging.WARNING)
