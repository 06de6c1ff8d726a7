"""What the faces (server, command line) may ask of an engine. Knows no implementation.

``engine.front.AsyncLLM`` is the real one; tests of the faces use a fake of a few lines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shoal.engine.outputs import RequestDelta
from shoal.sampling_params import SamplingParams

if TYPE_CHECKING:  # they import what computes
    from shoal.engine.encode_tasks import EncoderTasks, Job

__all__ = ["EngineInfo", "EngineStats", "Frontend", "Prompt"]

Output = TypeVar("Output")

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, ``{"prompt": text}``, ``{"prompt_token_ids": [...]}``, or a list of token ids. For
encoder-decoders also ``{"encoder_prompt": any of these, "decoder_prompt": token ids}``."""


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
    way: str = "paged"  # how the model is served
    num_slots: int = 0  # states kept; 0: the model keeps none
    num_window_blocks: int = 0  # of layers that keep no more than they see; 0: all keep all
    window: int = 0  # positions that these see
    plan_summary: tuple[tuple[str, str, str], ...] = ()  # (pattern, how split, per rank)
    ranks: tuple[Mapping[str, int], ...] = ()  # rank, weight_bytes, kv_bytes, kv_bytes_per_token, bytes_read
    load_s: float = 0.0
    notes: tuple[str, ...] = ()  # what rank 0 said of how it computes


@dataclass(slots=True)
class EngineStats:
    """Counters and gauges at one instant."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_requests: int = 0  # of these, beyond what the next step has room for
    num_queued_tokens: int = 0  # prompt tokens of all that wait
    kv_cache_usage: float = 0.0  # share of blocks in use, 0 to 1: of the kind of which there are fewer left
    kv_cache_window_usage: float = 0.0  # of the blocks of layers that keep no more than a window
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0  # tokens looked up
    prefix_cache_hits_total: int = 0  # tokens found
    preemptions_total: int = 0
    steps_total: int = 0
    restarts_total: int = 0  # times the ranks were started anew
    replays_total: int = 0  # sequences put back because the ranks had failed
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

    async def died(self) -> str:
        """Wait until the engine has given up (or was shut down), and everyone was told; why it has."""
        ...

    def stats(self) -> EngineStats: ...

    def require_room(self, num_prompts: int = 1, num_branches: int = 1) -> None:
        """Refuse early what :meth:`stream` would refuse, so that nobody reads its prompt in vain.

        Args:
            num_prompts: that are to be submitted together.
            num_branches: of each.

        Raises:
            QueueFullError: too many requests wait, as of the last step.
            RequestError: there would be too many if nobody waited; ``field`` is ``prompt``.
        """
        ...

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
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        max_unread: int | None = None,
    ) -> AsyncIterator[RequestDelta]:
        """Deltas until ``finished``. Closing the iterator (or cancelling its task) aborts the request.

        So does a reader that leaves more than ``max_unread`` deltas untaken (None: they may pile up); it
        gets an EngineError in their place.

        Raises (at the first ``__anext__``, before anything reaches the engine):
            RequestError: the prompt or params cannot be served.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine has given up.
        """
        ...

    async def encode(self, make: Callable[[EncoderTasks], Job[Output]]) -> list[Output]:
        """What a job gives that ``make`` makes, on another thread, of what an encoder can be asked for.

        Raises:
            UnsupportedError: the model generates text, or does not have the task.
            RequestError: a text cannot be served.
            QueueFullError: too many texts wait.
            EngineDeadError: the engine has given up.
        """
        ...

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, let running ones finish for ``timeout_s`` seconds, then stop."""
        ...
