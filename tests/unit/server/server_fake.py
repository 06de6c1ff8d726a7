"""A counting engine of a few lines: branch b of any prompt says "b0 b1 b2 ...", one word a token.

Delays are events, so tests decide when it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from shoal.engine.outputs import CompletionDelta, RequestDelta, TokenLogprob
from shoal.engine.protocol import EngineInfo, EngineStats, Prompt
from shoal.errors import EngineDeadError, QueueFullError, RequestError
from shoal.sampling_params import SamplingParams
from shoal.server.app import create_app
from shoal.server.connections import limited
from shoal.server.run import bind, http_config
from shoal.server.settings import ServerSettings

SETTINGS = ServerSettings(model="demo")


class FakeFrontend:
    """Serves at once; ``hang_after`` tokens it waits for ``go_on`` (forever unless a test sets it)."""

    def __init__(self, hang_after: int | None = None, refusal: Exception | None = None) -> None:
        self.hang_after = hang_after
        self.refusal = refusal
        self.branch_error: str | None = None
        self.failing_branches: set[int] | None = None  # None: all, if there is an error
        self.is_full = False
        self.finish_reason = "length"
        self.is_ready = True
        self.is_alive = True
        self.max_model_len = 64
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.seen: list[tuple[Prompt, SamplingParams]] = []
        self.rendered: list[tuple[list[Mapping[str, Any]], dict[str, Any]]] = []
        self.abort_seen = threading.Event()
        self.hanging = threading.Event()
        self.go_on = asyncio.Event()
        self.death = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = (
            None  # of the last request, to set ``go_on`` from outside
        )
        self.shutdowns: list[float | None] = []
        self.totals = EngineStats()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("demo", "Fake", self.max_model_len, 1, 8, 16, "none", "float32", "cpu")

    async def died(self) -> str:
        await self.death.wait()
        return "the engine has failed: rank 1 was killed by signal 9"

    def stats(self) -> EngineStats:
        self.totals.num_running = len(self.running)
        return self.totals

    def require_room(self, num_prompts: int = 1, num_branches: int = 1) -> None:
        if self.is_full:
            raise QueueFullError("1 requests wait already", retry_after_s=2.5)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        self.rendered.append((list(messages), arguments))
        return self.tokenize("".join(f"{m['role']}:{m['content']};" for m in messages))

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        max_unread: int | None = None,
    ) -> AsyncIterator[RequestDelta]:
        if self.refusal is not None:
            raise self.refusal
        ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids or len(ids) >= self.max_model_len:
            raise RequestError(f"prompt: {len(ids)} tokens do not fit", field="prompt")
        assert request_id is not None and request_id not in self.running
        self.seen.append((prompt, params))
        self.running.add(request_id)
        self.loop = asyncio.get_running_loop()
        try:
            limit = params.max_tokens or self.max_model_len - len(ids)
            for position in range(limit):
                if position == self.hang_after:
                    self.hanging.set()
                    await self.go_on.wait()
                await asyncio.sleep(0)
                delta = self._delta(params, request_id, position, limit, len(ids))
                yield delta
                if delta.finished:
                    break
            self.totals.requests_total[self.finish_reason] = 1
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            self.abort_seen.set()
            raise
        finally:
            self.running.discard(request_id)

    def _delta(
        self, params: SamplingParams, request_id: str, position: int, limit: int, num_prompt: int
    ) -> RequestDelta:
        outputs = []
        ended = position == limit - 1
        for branch in range(params.n):
            word = f"{branch}{position} "
            self.totals.generation_tokens_total += 1
            out = CompletionDelta(branch, word, [100 + position])
            if params.logprobs is not None:
                out.logprobs = [_logprobs(word, position, params.logprobs)]
            if any(stop in word for stop in params.stop or ()):
                out.text, out.finish_reason, out.stop_reason = "", "stop", word.strip()
                ended = True
            elif ended:
                out.finish_reason = self.finish_reason
            fails = self.failing_branches is None or branch in self.failing_branches
            if self.branch_error is not None and fails and position >= 1:
                if position > 1:
                    continue
                out.finish_reason, out.error = "error", self.branch_error
            outputs.append(out)
        return RequestDelta(request_id, outputs, ended, num_prompt, num_cached_tokens=1)

    async def shutdown(self, timeout_s: float | None = None) -> None:
        self.shutdowns.append(timeout_s)
        self.go_on.set()


def _logprobs(word: str, position: int, count: int) -> dict[int, TokenLogprob]:
    """The chosen token is the second most likely."""
    found = {100 + position: TokenLogprob(-1.0, 2, word)}
    others = [TokenLogprob(-0.5, 1, "best"), TokenLogprob(float("-inf"), 3, "never")]
    for index, other in enumerate(others[: max(0, count - (count > 1))]):
        found[index] = other
    return found


def dead_frontend() -> FakeFrontend:
    """An engine that has given up."""
    frontend = FakeFrontend(refusal=EngineDeadError("rank 1 died too often"))
    frontend.is_ready = frontend.is_alive = False
    return frontend


@contextlib.contextmanager
def live_server(frontend: FakeFrontend, settings: ServerSettings = SETTINGS, **limits: Any) -> Iterator[str]:
    """The app behind a real uvicorn on a free loopback port; yields its URL.

    Args:
        limits: of ``shoal.server.connections.limited``.
    """
    app = create_app(frontend, settings)
    listener = bind("127.0.0.1", 0)
    protocol = limited(**{"max_connections": settings.max_connections, **limits})
    server = uvicorn.Server(http_config(app, protocol, settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
