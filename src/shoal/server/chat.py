"""``POST /v1/chat/completions``. Knows messages and OpenAI's chat objects, and no engine but its protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shoal.engine.outputs import CompletionOutput
from shoal.errors import RequestError, UnsupportedError
from shoal.server.answer import (
    Answer,
    IndexedDeltas,
    answer_streaming,
    answer_whole,
    deltas_of,
    new_answer,
)
from shoal.server.body import read_body
from shoal.server.logprobs import chat_logprobs
from shoal.server.schemas import ChatRequest
from shoal.server.state import state_of
from shoal.server.waiting import Deadline

__all__ = ["create_chat_completion", "text_messages"]

_ROLES = ("system", "developer", "user", "assistant")
_TEMPLATE_ARGUMENTS_REFUSED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",  # a template is a program: the server runs only the model's own
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    deadline = Deadline(state.settings.request_timeout_s)
    body = await read_body(request, ChatRequest)
    deadline.shorten(body.timeout)
    model = state.model_name(body.model)
    messages = text_messages(body.messages)
    params = body.sampling_params()
    # A long conversation takes seconds to tokenise; the event loop has other clients.
    prompt = await asyncio.to_thread(
        state.serving().render_chat,
        messages,
        add_generation_prompt=body.add_generation_prompt,
        **_template_arguments(body.chat_template_kwargs or {}),
    )
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    answer = new_answer(request, "chatcmpl", kind, model, body.n)
    deltas = deltas_of(state, [prompt], params, answer)
    if body.stream:
        return await answer_streaming(request, _chunks(body, answer, deltas), deadline)

    def choice(_: int, output: CompletionOutput) -> dict[str, Any]:
        logprobs = chat_logprobs(output.logprobs or [], body.top_logprobs or 0) if body.logprobs else None
        return {
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    return await answer_whole(request, answer, deltas, deadline, choice)


def text_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with every content as one text, as chat templates take them.

    Text parts are joined by line breaks (as vLLM does for such templates).

    Raises:
        RequestError: a message that is malformed; ``field`` is like ``messages[0].role``.
        UnsupportedError: images, audio, files or tool calls.
    """
    return [_text_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _text_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role in ("tool", "function"):
        raise UnsupportedError(f"{where}.role: tool calling is not supported", field=f"{where}.role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role: must be one of {', '.join(_ROLES)}, got {role!r:.80}", field=f"{where}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise UnsupportedError(f"{where}.{name}: only text is supported", field=f"{where}.{name}")
    text = {"role": role, "content": _text_content(message.get("content"), f"{where}.content")}
    if message.get("name") is not None:
        if not isinstance(message["name"], str):
            raise RequestError(f"{where}.name: must be text", field=f"{where}.name")
        text["name"] = message["name"]
    return text


def _text_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where}: must be text or a list of text parts, got {content!r:.80}", field=where)
    return "\n".join(_text_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and kind != "text":
        raise UnsupportedError(f"{where}: {kind!r:.80} is not supported, only text parts are", field=where)
    raise RequestError(f"{where}: must be an object like {{'type': 'text', 'text': '...'}}", field=where)


def _template_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    refused = sorted(_TEMPLATE_ARGUMENTS_REFUSED & arguments.keys())
    if refused:
        raise RequestError(
            f"chat_template_kwargs: {refused[0]!r} cannot be set here", field="chat_template_kwargs"
        )
    return arguments


async def _chunks(
    body: ChatRequest, answer: Answer, deltas: IndexedDeltas
) -> AsyncGenerator[dict[str, Any], None]:
    """First a role for every branch, then text as it comes; a branch's last chunk says why it ended."""

    def chunk(index: int, delta: dict[str, Any], **further: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **further}
        if body.wants_continuous_usage:
            return answer.body([choice], usage=answer.usage())
        return answer.body([choice], **({"usage": None} if body.wants_usage else {}))

    opened = False
    async with aclosing(deltas):
        async for _, request_delta in deltas:
            if not opened:
                opened = True
                for index in range(body.n):
                    yield chunk(index, {"role": "assistant", "content": ""})
            for delta in request_delta.outputs:
                logprobs = None
                if body.logprobs and delta.logprobs:
                    logprobs = chat_logprobs(delta.logprobs, body.top_logprobs or 0)
                if delta.text or logprobs:
                    yield chunk(delta.index, {"content": delta.text}, logprobs=logprobs)
                if delta.finish_reason is not None:
                    yield chunk(
                        delta.index, {}, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
                    )
        if body.wants_usage:
            yield answer.body([], usage=answer.usage())
