"""``AsyncLLM``: the engine for asyncio. Checks what can be checked before anything reaches the engine's
thread, and turns that thread's deltas into async iterators. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from shoal.config import EngineConfig, make_config
from shoal.engine.core import EngineCore
from shoal.engine.encode_core import EncodeCore
from shoal.engine.encode_front import run_job_async
from shoal.engine.encode_tasks import EncoderTasks, Job, Output
from shoal.engine.launch import launch
from shoal.engine.loop import EngineLoop
from shoal.engine.mailbox import Mailbox
from shoal.engine.outputs import RequestDelta, RequestOutput
from shoal.engine.pace import Pace
from shoal.engine.protocol import EngineInfo, EngineStats, Prompt
from shoal.engine.results import Collector
from shoal.engine.unread import Unread
from shoal.errors import (
    EngineDeadError,
    EngineError,
    QueueFullError,
    RequestError,
    ShoalError,
    UnsupportedError,
)
from shoal.sampling_params import SamplingParams

__all__ = ["AsyncLLM"]

_Item = RequestDelta | ShoalError | None  # what a sink gets

_LONG_TEXT = 1 << 11  # characters; so many take a millisecond or two to tokenise


class AsyncLLM:
    """An engine on a thread of its own; see :class:`shoal.engine.protocol.Frontend`.

    ``await AsyncLLM.start("demo", tensor_parallel_size=2)`` loads without blocking the event loop;
    ``AsyncLLM("demo")`` loads at once.
    """

    def __init__(self, model: str = "", *, config: EngineConfig | None = None, **options: Any) -> None:
        config = config or make_config(model=model, **options)
        self._open(launch(config), config)

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
        front._open(core, config)
        return front

    def _open(self, core: EngineCore | EncodeCore, config: EngineConfig) -> None:
        self._tasks = core.tasks if isinstance(core, EncodeCore) else None
        self._config = config
        self._info = core.info
        self._tokenizer = core.tokenizer
        self._most_characters = core.info.max_model_len * core.tokenizer.longest_token
        self._mailbox: Mailbox[_Item] = Mailbox()
        self._loop = EngineLoop(core, self._mailbox.flush)
        self._draining = False
        self._pace = Pace()
        # A front that is dropped, or alive when the program ends, takes its thread and its ranks along.
        weakref.finalize(self, self._loop.stop)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def is_ready(self) -> bool:
        return self._loop.is_ready and not self._draining

    @property
    def is_alive(self) -> bool:
        return self._loop.is_alive

    async def died(self) -> str:
        return await asyncio.shield(asyncio.wrap_future(self._loop.ended))

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def require_room(self, num_prompts: int = 1, num_branches: int = 1) -> None:
        bound = self._config.max_num_queued_requests
        if bound is None:
            return
        most = self._config.max_num_seqs + bound
        if (num_prompts - 1) * num_branches >= most:
            each = "" if num_branches == 1 else f" of {num_branches} branches each"
            raise RequestError(
                f"prompt: {num_prompts} prompts{each} in one request, and no more than {most} sequences run "
                f"and wait (max_num_seqs is {self._config.max_num_seqs}, max_num_queued_requests {bound}); "
                "send fewer at a time",
                field="prompt",
            )
        num_queued = self._loop.stats().num_queued_requests
        if num_queued >= bound:
            message = f"{num_queued} requests wait already (max_num_queued_requests is {bound})"
            raise self._timed(QueueFullError(message))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        text = self._tokenizer.chat_text(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        self._check_characters(len(text), "messages")
        return self._tokenizer.encode_chat(text)

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        max_unread: int | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        _, prompt_ids = await self._resolve(prompt)
        request_id = request_id or uuid.uuid4().hex
        async with aclosing(self._stream(prompt_ids, params, request_id, max_unread)) as deltas:
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
        async with aclosing(self._stream(prompt_ids, params, request_id, None)) as deltas:
            async for delta in deltas:
                collector.push(delta)
                yield collector.output()

    async def encode(self, make: Callable[[EncoderTasks], Job[Output]]) -> list[Output]:
        if self._draining:
            raise EngineDeadError("the engine is shutting down")
        if self._tasks is None:
            raise UnsupportedError(
                "model: it generates text; start it with runner pooling for vectors", field="model"
            )
        job = await asyncio.to_thread(make, self._tasks)  # which tokenises
        try:
            return await run_job_async(self._loop, self._mailbox, job)
        except QueueFullError as refusal:
            raise self._timed(refusal) from None

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
        given = prompt.values() if isinstance(prompt, Mapping) else (prompt,)
        for value in given:
            if isinstance(value, str):
                self._check_characters(len(value), "prompt")
            elif isinstance(value, Sequence) and len(value) > self._info.max_model_len:
                raise RequestError(
                    f"prompt: has {len(value)} tokens, which exceeds max_model_len "
                    f"({self._info.max_model_len}); shorten it",
                    field="prompt",
                )
        if any(isinstance(value, str) and len(value) > _LONG_TEXT for value in given):
            return await asyncio.to_thread(self._tokenizer.resolve_prompt, prompt)
        return self._tokenizer.resolve_prompt(prompt)

    def _check_characters(self, count: int, field: str) -> None:
        """Refuse what cannot fit however it is tokenised, which may take a minute."""
        if count > self._most_characters:
            raise RequestError(
                f"{field}: has {count} characters, and the {self._info.max_model_len} tokens of "
                f"max_model_len hold {self._most_characters} at most; shorten it",
                field=field,
            )

    async def _stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str, max_unread: int | None
    ) -> AsyncGenerator[RequestDelta, None]:
        if self._draining:
            raise EngineDeadError("the engine is shutting down")
        if self._tasks is not None:
            raise UnsupportedError(
                f"model: {self._info.architecture} makes vectors and scores; it generates no text",
                field="model",
            )
        events, post = asyncio.get_running_loop(), self._mailbox.post

        def sink(item: _Item) -> None:
            post(events, unread, item)

        def overrun() -> ShoalError:
            self._loop.abort(request_id, sink)
            return EngineError(f"the reader left {max_unread} parts of the answer unread; it was given up")

        unread = Unread[_Item](max_unread, overrun)
        self._loop.submit(request_id, prompt_ids, params, sink)
        finished = False
        began: float | None = None  # when the first token came
        try:
            while not finished:
                item = await unread.get()
                if isinstance(item, ShoalError):
                    finished = True
                    raise self._timed(item) if isinstance(item, QueueFullError) else item
                if item is not None:
                    began = began or time.monotonic()
                    finished = item.finished
                    yield item
        finally:
            if not finished:
                self._loop.abort(request_id, sink)
            if began is not None:
                self._pace.ended(time.monotonic() - began)

    def _timed(self, refusal: QueueFullError) -> QueueFullError:
        """A refusal that says when to come again."""
        stats = self._loop.stats()
        refusal.retry_after_s = self._pace.seconds_for(stats.num_waiting, stats.num_running)
        return refusal
