"""What completions and chat answers have in common: ids, usage, gathering deltas. Knows no schema.

``Answer`` is filled as deltas pass, whether they are streamed on or gathered.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shoal.engine.outputs import CompletionDelta, CompletionOutput, RequestDelta
from shoal.engine.protocol import Prompt
from shoal.sampling_params import SamplingParams
from shoal.server.boundary import request_id_of
from shoal.server.errors import json_response
from shoal.server.sse import EventStream
from shoal.server.state import ServerState, state_of
from shoal.server.waiting import Deadline, merged, while_connected

__all__ = ["Answer", "IndexedDeltas", "answer_streaming", "answer_whole", "deltas_of", "new_answer"]

IndexedDeltas = AsyncGenerator[tuple[int, RequestDelta], None]
"""Deltas of several prompts, each with its prompt's index."""


@dataclass
class Answer:
    """One answer under way."""

    request_id: str  # as the client gave it, or drawn for it
    id: str  # as the answer has it, and the engine: the same with OpenAI's prefix
    object: str
    model: str
    num_branches: int  # per prompt
    created: int = field(default_factory=lambda: int(time.time()))
    _prompt_tokens: dict[int, tuple[int, int]] = field(default_factory=dict)  # prompt -> (all, cached)
    _num_completion_tokens: int = 0

    def count(self, prompt_index: int, delta: RequestDelta) -> None:
        """Take a delta into the usage."""
        self._prompt_tokens[prompt_index] = (delta.num_prompt_tokens, delta.num_cached_tokens)
        self._num_completion_tokens += sum(len(output.token_ids) for output in delta.outputs)

    def choice_index(self, prompt_index: int, branch: int) -> int:
        """OpenAI numbers the branches of all prompts through."""
        return prompt_index * self.num_branches + branch

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, so far."""
        num_prompt = sum(tokens for tokens, _ in self._prompt_tokens.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(c for _, c in self._prompt_tokens.values())},
        }

    def body(self, choices: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        """A response or chunk with ``choices``."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
            **further,
        }


def new_answer(request: Request, prefix: str, kind: str, model: str, num_branches: int) -> Answer:
    """An answer to ``request``."""
    request_id = request_id_of(request)
    return Answer(request_id, f"{prefix}-{request_id}", kind, model, num_branches)


async def deltas_of(
    state: ServerState, prompts: Sequence[Prompt], params: SamplingParams, answer: Answer
) -> IndexedDeltas:
    """The deltas of all prompts, submitted together and counted into ``answer``.

    Raises:
        Fault: 409, a request with this id is running.
    """
    with state.claim(answer.request_id):
        # Clients' ids hold no spaces: no other request's is one of these.
        ids = [answer.id if len(prompts) == 1 else f"{answer.id} {index}" for index in range(len(prompts))]
        streams = [state.stream(prompt, params, one) for prompt, one in zip(prompts, ids, strict=True)]
        async with aclosing(merged(streams)) as deltas:
            async for index, delta in deltas:
                answer.count(index, delta)
                yield index, delta


async def answer_whole(
    request: Request,
    answer: Answer,
    deltas: IndexedDeltas,
    deadline: Deadline,
    choice: Callable[[int, CompletionOutput], dict[str, Any]],
) -> Response:
    """Gather everything, then answer once.

    Args:
        choice: (prompt index, branch complete) to OpenAI's choice; its ``index`` is set here.
    """
    try:
        outputs = await while_connected(request.receive, _gathered(deltas), deadline)
    finally:
        await deltas.aclose()
    choices = []
    for (prompt_index, branch), output in sorted(outputs.items()):
        choices.append({"index": answer.choice_index(prompt_index, branch), **choice(prompt_index, output)})
    return json_response(answer.body(choices, usage=answer.usage()))


async def _gathered(deltas: IndexedDeltas) -> dict[tuple[int, int], CompletionOutput]:
    outputs: dict[tuple[int, int], CompletionOutput] = {}
    texts: dict[tuple[int, int], list[str]] = {}
    async for prompt_index, request_delta in deltas:
        for delta in request_delta.outputs:
            key = (prompt_index, delta.index)
            output = outputs.setdefault(key, CompletionOutput(delta.index))
            texts.setdefault(key, []).append(delta.text)
            _extend(output, delta)
    for key, output in outputs.items():
        output.text = "".join(texts[key])
    return outputs


def _extend(output: CompletionOutput, delta: CompletionDelta) -> None:
    output.token_ids += delta.token_ids
    if delta.logprobs is not None:
        output.logprobs = (output.logprobs or []) + delta.logprobs
    if delta.finish_reason is not None:
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason


async def answer_streaming(
    request: Request, chunks: AsyncGenerator[dict[str, Any], None], deadline: Deadline
) -> Response:
    """Stream ``chunks``. The first is awaited before the status is sent, so that a refusal has its own."""
    try:
        first = await while_connected(request.receive, anext(chunks), deadline)
    except BaseException:  # also when cancelled: the engine must not go on for nobody
        await chunks.aclose()
        raise
    return EventStream(first, chunks, deadline, state_of(request).metrics.count)
