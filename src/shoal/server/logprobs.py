"""Logprobs in OpenAI's two formats. Knows no request.

Both take, per generated token, ``{token id: TokenLogprob}`` with the chosen token first, then the
most likely ones (``engine.outputs``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.engine.outputs import TokenLogprob

__all__ = ["chat_logprobs", "completion_logprobs"]

_LEAST = -9999.0  # JSON has no -inf; vLLM's value for it

Candidates = Mapping[int, TokenLogprob]


def completion_logprobs(tokens: Sequence[Candidates], num_top: int, text_offset: int) -> dict[str, Any]:
    """The completions format: parallel lists.

    Args:
        tokens: the candidates of each generated token.
        num_top: how many of the most likely tokens to show beside the chosen one.
        text_offset: characters of this choice before the first of ``tokens``.
    """
    texts, chosen_logprobs, tops, offsets = [], [], [], []
    for candidates in tokens:
        chosen = next(iter(candidates.values()))
        top: dict[str, float] = {chosen.decoded_token: _finite(chosen.logprob)} if num_top else {}
        for candidate in _most_likely(candidates, num_top):
            top.setdefault(candidate.decoded_token, _finite(candidate.logprob))
        texts.append(chosen.decoded_token)
        chosen_logprobs.append(_finite(chosen.logprob))
        tops.append(top)
        offsets.append(text_offset)
        text_offset += len(chosen.decoded_token)
    return {
        "tokens": texts,
        "token_logprobs": chosen_logprobs,
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[Candidates], num_top: int) -> dict[str, Any]:
    """The chat format: one object per token.

    Args:
        tokens: the candidates of each generated token.
        num_top: how many of the most likely tokens to list.
    """
    content = []
    for candidates in tokens:
        chosen = next(iter(candidates.values()))
        top = [_chat_token(candidate) for candidate in _most_likely(candidates, num_top)]
        content.append({**_chat_token(chosen), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _most_likely(candidates: Candidates, count: int) -> list[TokenLogprob]:
    """The ``count`` most likely; a chosen token that is not among them falls out."""
    return sorted(candidates.values(), key=lambda candidate: -candidate.logprob)[:count]


def _chat_token(candidate: TokenLogprob) -> dict[str, Any]:
    text = candidate.decoded_token
    return {
        "token": text,
        "logprob": _finite(candidate.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
