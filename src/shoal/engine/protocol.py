"""What the faces (server, command line) may ask of an engine. Knows no implementation.

``engine.front.AsyncLLM`` is the real one; tests of the faces use a fake of a few lines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.engine.outputs import RequestDelta
from shoal.sampling_params import SamplingParams

__all__ = ["EngineInfo", "EngineStats", "Frontend", "Prompt"]

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, ``{"prompt": text}``, ``{"prompt_token_ids": [...]}``, or a list of token ids."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Fixed facts of a running engine, for headers, ``/v1/models`` and summaries."""

    model: str  # as the user named it
    architecture: str
    max_model_len: int
    tensor_parallel_size: int
    num_blocks: int
    block_size: int
    attention: str
    dtype: str
    device: str
    plan_summary: tuple[tuple[str, str, str], ...] = ()  # (pattern, how split, per rank)
    ranks: tuple[Mapping[str, int], ...] = ()  # rank, weight_bytes, kv_bytes, kv_bytes_per_token, bytes_read
    load_s: float = 0.0


@dataclass(slots=True)
class EngineStats:
    """Counters and gauges at one instant."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of blocks in use, 0 to 1
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0  # tokens looked up
    prefix_cache_hits_total: int = 0  # tokens found
    preemptions_total: int = 0
    steps_total: int = 0
    requests_total: dict[str, int] = field(default_factory=dict)  # by finish reason


class Frontend(Protocol):
    """An engine as its faces see it. All methods are safe to call from any asyncio loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_ready(self) -> bool:
        """Requests are being served now."""
        ...

    @property
    def is_alive(self) -> bool:
        """Not given up: serving, or able to recover."""
        ...

    def stats(self) -> EngineStats: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Prompt ids of a conversation.

        Raises:
            RequestError: no chat template, or the template refuses the messages.
        """
        ...

    def tokenize(self, text: str) -> list[int]: ...

    def stream(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestDelta]:
        """Deltas until ``finished``. Closing the iterator (or cancelling its task) aborts the request.

        Raises (at the first ``__anext__``, before anything reaches the engine):
            RequestError: the prompt or params cannot be served.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine has given up.
        """
        ...

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, let running ones finish for ``timeout_s`` seconds, then stop."""
        ...
