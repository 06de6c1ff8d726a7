"""``AsyncLLM``: the engine for asyncio. Checks what can be checked before anything reaches the engine's
thread, and turns that thread's deltas into async iterators. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from shoal.config import EngineConfig, make_config
from shoal.engine.core import EngineCore
from shoal.engine.launch import launch
from shoal.engine.loop import EngineLoop
from shoal.engine.mailbox import Mailbox
from shoal.engine.outputs import RequestDelta, RequestOutput
from shoal.engine.protocol import EngineInfo, EngineStats, Prompt
from shoal.engine.results import Collector
from shoal.errors import EngineDeadError, ShoalError
from shoal.sampling_params import SamplingParams

__all__ = ["AsyncLLM"]

_LONG_TEXT = 1 << 14  # characters; so many take some 10 ms to tokenise


class AsyncLLM:
    """An engine on a thread of its own; see :class:`shoal.engine.protocol.Frontend`.

    ``await AsyncLLM.start("demo", tensor_parallel_size=2)`` loads without blocking the event loop;
    ``AsyncLLM("demo")`` loads at once.
    """

    def __init__(self, model: str = "", *, config: EngineConfig | None = None, **options: Any) -> None:
        config = config or make_config(model=model, **options)
        self._open(launch(config))

    @classmethod
    async def start(
        cls,
        model: str = "",
        *,
        config: EngineConfig | None = None,
        show_progress: bool = False,
        **options: Any,
    ) -> AsyncLLM:
        """Load an engine without blocking the event loop.

        Raises:
            UsageError: the model or an option is wrong.
            RankError: a rank failed while loading.
        """
        config = config or make_config(model=model, **options)
        core = await asyncio.to_thread(launch, config, show_progress)
        front = cls.__new__(cls)
        front._open(core)
        return front

    def _open(self, core: EngineCore) -> None:
        self._info = core.info
        self._tokenizer = core.tokenizer
        self._mailbox: Mailbox[RequestDelta | ShoalError | None] = Mailbox()
        self._loop = EngineLoop(core, self._mailbox.flush)
        self._draining = False
        # A front that is dropped, or alive when the program ends, takes its thread and its ranks along.
        weakref.finalize(self, self._loop.stop)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def is_ready(self) -> bool:
        return self._loop.is_alive and not self._draining

    @property
    def is_alive(self) -> bool:
        return self._loop.is_alive

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        return self._tokenizer.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    async def stream(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestDelta, None]:
        _, prompt_ids = await self._resolve(prompt)
        async with aclosing(self._stream(prompt_ids, params, request_id or uuid.uuid4().hex)) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request as it stands after each delta, vLLM's shape: texts and ids grow until ``finished``."""
        text, prompt_ids = await self._resolve(prompt)
        params = sampling_params or SamplingParams()
        request_id = request_id or uuid.uuid4().hex
        collector = Collector(request_id, text, prompt_ids, params)
        async with aclosing(self._stream(prompt_ids, params, request_id)) as deltas:
            async for delta in deltas:
                collector.push(delta)
                yield collector.output()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, let running ones finish for ``timeout_s`` seconds (None: not at all), stop."""
        self._draining = True
        if timeout_s:
            await asyncio.to_thread(self._loop.drain, timeout_s)
        await asyncio.to_thread(self._loop.stop)

    async def _resolve(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text and ids of a prompt; a long one is tokenised off the event loop, which has other clients."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > _LONG_TEXT:
            return await asyncio.to_thread(self._tokenizer.resolve_prompt, prompt)
        return self._tokenizer.resolve_prompt(prompt)

    async def _stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestDelta, None]:
        if self._draining:
            raise EngineDeadError("the engine is shutting down")
        events, post = asyncio.get_running_loop(), self._mailbox.post
        arrived: asyncio.Queue[RequestDelta | ShoalError | None] = asyncio.Queue()

        def sink(item: RequestDelta | ShoalError | None) -> None:
            post(events, arrived, item)

        self._loop.submit(request_id, prompt_ids, params, sink)
        finished = False
        try:
            while not finished:
                item = await arrived.get()
                if isinstance(item, ShoalError):
                    finished = True
                    raise item
                if item is not None:
                    finished = item.finished
                    yield item
        finally:
            if not finished:
                self._loop.abort(request_id, sink)
