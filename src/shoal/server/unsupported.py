"""Request fields that change what an answer means and that shoal does not have: refused by name,
because an answer that ignored them would be wrong. Knows no engine.

A field with one of its neutral values asks for nothing and passes. Fields in ``WITHOUT_EFFECT``
are meant for OpenAI's own service and never change the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shoal.errors import UnsupportedError

__all__ = ["refuse_unsupported", "unknown_fields"]

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_NO_TOOLS = "tool calling is not supported"
_NO_GUIDE = "guided decoding is not supported"
_OFF: tuple[Any, ...] = (False, [], {})

UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (_NO_TOOLS, _OFF),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),
    "functions": (_NO_TOOLS, _OFF),
    "function_call": (_NO_TOOLS, ("none", "auto")),
    "response_format": ("only {'type': 'text'} is supported", ({"type": "text"},)),
    "guided_json": (_NO_GUIDE, ()),
    "guided_regex": (_NO_GUIDE, ()),
    "guided_choice": (_NO_GUIDE, ()),
    "guided_grammar": (_NO_GUIDE, ()),
    "structured_outputs": (_NO_GUIDE, ()),
    "modalities": ("only ['text'] is supported", (["text"],)),
    "audio": ("only text is supported", _OFF),
    "prediction": ("predicted outputs are not supported", _OFF),
    "web_search_options": ("web search is not supported", ()),
    "suffix": ("inserting before a suffix is not supported", ("",)),
    "prompt_embeds": ("only text and token ids are supported", _OFF),
    "prompt_logprobs": ("logprobs of the prompt are not supported", _OFF),
    "bad_words": ("not supported; use logit_bias", _OFF),
    "allowed_token_ids": ("not supported; use logit_bias", ()),
    "logits_processors": ("custom processors are not supported", _OFF),
    "truncate_prompt_tokens": ("not supported; shorten the prompt", ()),
    "chat_template": ("a template of the request's own is not supported", ()),
    "documents": ("documents are not supported; put them into a message", _OFF),
    "continue_final_message": ("not supported; use /v1/completions", _OFF),
}


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Refuse the first field that asks for what shoal does not have.

    Raises:
        UnsupportedError: ``field`` names it.
    """
    for name, value in fields.items():
        if name in UNSUPPORTED and value is not None:
            reason, neutral = UNSUPPORTED[name]
            if value not in neutral:
                raise UnsupportedError(f"{name}: {reason}", field=name)


def unknown_fields(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that shoal has never heard of."""
    return [name for name in names if name not in UNSUPPORTED and name not in WITHOUT_EFFECT]
