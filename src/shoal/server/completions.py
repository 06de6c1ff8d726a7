"""``POST /v1/completions``. Knows prompts and OpenAI's completion objects, and no engine but its protocol."""

from __future__ import annotations

import reprlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shoal.engine.outputs import CompletionDelta, CompletionOutput
from shoal.errors import RequestError
from shoal.server.answer import (
    Answer,
    IndexedDeltas,
    answer_streaming,
    answer_whole,
    deltas_of,
    new_answer,
)
from shoal.server.body import read_body
from shoal.server.logprobs import completion_logprobs
from shoal.server.schemas import CompletionRequest
from shoal.server.state import state_of
from shoal.server.waiting import Deadline

__all__ = ["create_completion", "split_prompts"]

_MOST_PROMPTS = 2048  # OpenAI's limit
_MOST_CHOICES = 2048  # prompts times n


async def create_completion(request: Request) -> Response:
    """Complete one or several prompts, as text or as token ids."""
    state = state_of(request)
    deadline = Deadline(state.settings.request_timeout_s)
    body = await read_body(request, CompletionRequest)
    deadline.shorten(body.timeout)
    model = state.model_name(body.model)
    prompts = split_prompts(body.prompt)
    if len(prompts) * body.n > _MOST_CHOICES:
        raise RequestError(
            f"n: at most {_MOST_CHOICES} choices in one request, got {len(prompts)} prompts times {body.n}",
            field="n",
        )
    echoes = _echoes(prompts, body.echo)
    params = body.sampling_params()
    state.serving(len(prompts), body.n)
    answer = new_answer(request, "cmpl", "text_completion", model, body.n)
    deltas = deltas_of(state, prompts, params, answer)
    if body.stream:
        return await answer_streaming(request, _chunks(body, answer, deltas, echoes), deadline)

    def choice(prompt_index: int, output: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if body.logprobs is not None:
            logprobs = completion_logprobs(output.logprobs or [], body.logprobs, 0)
        return {
            "text": echoes[prompt_index] + output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **_token_ids(body, output),
        }

    return await answer_whole(request, answer, deltas, deadline, choice)


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """OpenAI's four forms as one list: text, texts, token ids, lists of token ids.

    Raises:
        RequestError: another form, or nothing in it; ``field`` is ``prompt``.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _not_a_prompt(prompt)
    if _are_token_ids(prompt):
        return [prompt]
    if len(prompt) > _MOST_PROMPTS:
        message = f"prompt: at most {_MOST_PROMPTS} prompts in one request, got {len(prompt)}"
        raise RequestError(message, field="prompt")
    if all(isinstance(one, str) for one in prompt):
        return prompt
    if all(isinstance(one, list) and one and _are_token_ids(one) for one in prompt):
        return prompt
    raise _not_a_prompt(prompt)


def _are_token_ids(prompt: Sequence[Any]) -> bool:
    return all(type(token) is int and 0 <= token < 2**31 for token in prompt)  # a bool is an int, too


def _not_a_prompt(prompt: Any) -> RequestError:
    return RequestError(
        "prompt: must be text, a list of texts, a list of token ids or a list of such lists, none empty, "
        f"got {reprlib.repr(prompt)}",
        field="prompt",
    )


def _echoes(prompts: Sequence[str | list[int]], echo: bool) -> list[str]:
    """What each prompt's choices begin with."""
    if not echo:
        return [""] * len(prompts)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise RequestError("echo: only for a prompt given as text", field="echo")
    return texts


async def _chunks(
    body: CompletionRequest, answer: Answer, deltas: IndexedDeltas, echoes: Sequence[str]
) -> AsyncGenerator[dict[str, Any], None]:
    usage: dict[str, Any] = {"usage": None} if body.wants_usage else {}
    offsets: dict[int, int] = {}  # choice -> characters before its next token
    async with aclosing(deltas):
        async for prompt_index, request_delta in deltas:
            for delta in request_delta.outputs:
                index = answer.choice_index(prompt_index, delta.index)
                begins = index not in offsets
                offset = offsets.setdefault(index, 0)
                if not (
                    begins
                    or delta.text
                    or delta.finish_reason
                    or (body.logprobs is not None and delta.logprobs)
                    or (body.return_token_ids and delta.token_ids)
                ):
                    continue
                choice, offsets[index] = _chunk_choice(index, delta, body.logprobs, offset)
                choice |= _token_ids(body, delta)
                if begins:
                    choice["text"] = echoes[prompt_index] + delta.text
                if body.wants_continuous_usage:
                    usage = {"usage": answer.usage()}
                yield answer.body([choice], **usage)
        if body.wants_usage:
            yield answer.body([], usage=answer.usage())


def _token_ids(body: CompletionRequest, output: CompletionOutput | CompletionDelta) -> dict[str, list[int]]:
    """What a choice says of its ids, if it is to say something."""
    return {"token_ids": output.token_ids} if body.return_token_ids else {}


def _chunk_choice(
    index: int, delta: CompletionDelta, num_top: int | None, offset: int
) -> tuple[dict[str, Any], int]:
    """A chunk's choice, and the character offset after it."""
    logprobs = None
    if num_top is not None and delta.logprobs:
        logprobs = completion_logprobs(delta.logprobs, num_top, offset)
        offset += sum(map(len, logprobs["tokens"]))
    choice = {
        "index": index,
        "text": delta.text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    return choice, offset
