"""What the routes of one app share: the engine (once there is one), settings, metrics. Knows no schema."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator

from starlette.requests import Request

from shoal.engine.outputs import RequestDelta
from shoal.engine.protocol import EngineStats, Frontend, Prompt
from shoal.errors import EngineError
from shoal.metrics import ServerMetrics
from shoal.sampling_params import SamplingParams
from shoal.server.errors import Fault
from shoal.server.settings import ServerSettings
from shoal.server.waiting import close

__all__ = ["ServerState", "state_of"]

_log = logging.getLogger("shoal.server")

_MOST_NAMES_REMEMBERED = 100
_MOST_UNREAD = 1024  # deltas of one request, behind what the kernel and the socket's buffer hold


class ServerState:
    """The changing part of a server: loading (no frontend), serving, draining.

    Args:
        frontend: the engine, or None while it loads (then :meth:`attach` it).
        settings: the server's options.
    """

    def __init__(self, frontend: Frontend | None, settings: ServerSettings) -> None:
        self.settings = settings
        self.frontend = frontend
        self.draining = False
        self.created = int(time.time())
        self.metrics = ServerMetrics(settings.names[0], self._read_stats)
        self._names_warned: set[str] = set()
        self._running_ids: set[str] = set()

    def attach(self, frontend: Frontend) -> None:
        """The engine has loaded."""
        self.frontend = frontend

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    @property
    def is_ready(self) -> bool:
        """New requests are served now."""
        return not self.draining and self.frontend is not None and self.frontend.is_ready

    @property
    def is_alive(self) -> bool:
        """Loading, serving, recovering or draining: anything but given up."""
        return self.frontend is None or self.frontend.is_alive

    def serving(self, num_prompts: int = 1, num_branches: int = 1) -> Frontend:
        """The engine, for a new request. One that recovers still takes requests; they wait.

        Args:
            num_prompts, num_branches: of the request, see :meth:`Frontend.require_room`.

        Raises:
            Fault: 503 while loading or draining, and after the engine gave up.
            QueueFullError, RequestError: it would be refused, so that its prompt need not be looked at.
        """
        if self.draining:
            raise _unavailable("the server is shutting down", "draining")
        if self.frontend is None:
            raise _unavailable("the model is still loading", "loading", retry_after_s=5)
        if not self.frontend.is_alive:
            raise _unavailable("the engine has stopped after a failure", "engine_dead")
        self.frontend.require_room(num_prompts, num_branches)
        return self.frontend

    @contextlib.contextmanager
    def claim(self, request_id: str) -> Iterator[None]:
        """Hold a request's id while it runs.

        Raises:
            Fault: 409, another one that runs has it.
        """
        if request_id in self._running_ids:
            message = f"X-Request-Id: {request_id!r} is the id of a request that is still running"
            raise Fault(409, message, code="duplicate_request_id")
        self._running_ids.add(request_id)
        try:
            yield
        finally:
            self._running_ids.remove(request_id)

    def model_name(self, requested: str | None) -> str:
        """The name to answer with.

        Raises:
            Fault: 404, the model is not served here.
        """
        names = self.settings.names
        if requested is None:
            return names[0]
        if requested not in names:
            message = f"model: {requested!r} is not served here; there is {', '.join(map(repr, names))}"
            raise Fault(404, message, param="model", code="model_not_found")
        return requested

    async def stream(
        self, prompt: Prompt, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestDelta, None]:
        """The engine's deltas, timed. Closing aborts. A branch that fails while others of the request go
        on shows it in its finish reason alone.

        Raises:
            EngineError: every branch failed, or the reader left too much unread.
            Fault: 503, the engine aborted the request.
        """
        finished = False
        num_failed = 0
        timer = self.metrics.timer()
        deltas = self.serving().stream(prompt, params, request_id, max_unread=_MOST_UNREAD)
        try:
            async for delta in deltas:
                for output in delta.outputs:
                    timer.tokens(output.index, len(output.token_ids))
                    num_failed += output.finish_reason == "error"
                    if num_failed == params.n:
                        raise EngineError(output.error or "the request failed")
                    if output.finish_reason == "abort":
                        raise _unavailable("the request was aborted: the server is shutting down", "aborted")
                if delta.finished:
                    finished = True
                    timer.finished(delta.num_prompt_tokens)
                yield delta
            if not finished:
                raise EngineError("the engine ended the request without finishing it")
        finally:
            await close(deltas)

    def warn_ignored(self, names: Iterable[str]) -> None:
        """Say once for each of ``names`` that a request field of that name has no effect."""
        for name in names:
            if name not in self._names_warned and len(self._names_warned) < _MOST_NAMES_REMEMBERED:
                self._names_warned.add(name)
                _log.warning("ignored the unknown request field %.100r", name)

    def _read_stats(self) -> EngineStats | None:
        return None if self.frontend is None else self.frontend.stats()


def _unavailable(message: str, code: str, retry_after_s: int = 1) -> Fault:
    return Fault(503, message, kind="server_error", code=code, headers={"Retry-After": str(retry_after_s)})


def state_of(request: Request) -> ServerState:
    """The state of the app that answers ``request``."""
    state = request.app.state.shoal
    assert isinstance(state, ServerState)
    return state
