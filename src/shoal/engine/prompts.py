"""What a caller may pass as a prompt, checked and turned into token ids. Knows no engine and no
lengths: whether the prompt fits is for those who know ``max_model_len``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.engine.protocol import Prompt
from shoal.errors import RequestError

__all__ = ["BothPrompts", "listed_prompts", "resolve_prompt"]

_KEYS = ("prompt", "prompt_token_ids")
_BOTH_KEYS = ("encoder_prompt", "decoder_prompt")

_Encode = Callable[[str], list[int]]


class BothPrompts(list[int]):
    """The ids of an encoder's prompt, and with them those that begin its decoder's sequence."""

    def __init__(self, encoder_ids: Sequence[int], decoder_ids: Sequence[int]) -> None:
        super().__init__(encoder_ids)
        self.decoder_ids = list(decoder_ids)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list; a list of integers is one prompt of token ids.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or a tensor: one prompt, or one a row
        prompts = prompts.tolist()
    try:
        many: list[Any] = list(prompts)
    except TypeError:
        kind = type(prompts).__name__
        raise RequestError(f"prompts: must be a prompt or a list of them, got {kind}", "prompts") from None
    return [many] if many and all(hasattr(item, "__index__") for item in many) else many


def resolve_prompt(prompt: Prompt, encode: _Encode, vocab_size: int) -> tuple[str | None, list[int]]:
    """The text (if any was given) and the token ids of a prompt.

    Args:
        prompt: text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a sequence of ids. A
            mapping with both is served by its ids and reports its text. For encoder-decoders also
            ``{"encoder_prompt": ..., "decoder_prompt": ...}``, each of these again, the latter as token ids
            or None; what comes back is :class:`BothPrompts` then.
        encode: text to ids; it refuses text if there is no tokenizer.
        vocab_size: the model's number of token embeddings.

    Raises:
        RequestError: empty, of the wrong type, ids out of range, or what ``encode`` raises.
    """
    if isinstance(prompt, str):
        return prompt, _encoded(prompt, encode, vocab_size)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, encode, vocab_size)
    return None, _checked_ids(prompt, vocab_size, "prompt")


def _from_mapping(
    prompt: Mapping[str, Any], encode: _Encode, vocab_size: int
) -> tuple[str | None, list[int]]:
    if any(key in _BOTH_KEYS for key in prompt):
        return _both(prompt, encode, vocab_size)
    for key in prompt:
        if key not in _KEYS:
            raise RequestError(f"prompt: unknown key {key!r}; there are: {', '.join(_KEYS)}", "prompt")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise RequestError(f"prompt: needs one of the keys {', '.join(_KEYS)}", "prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt: must be a string, got {type(text).__name__}", "prompt")
    if ids is not None:
        return text, _checked_ids(ids, vocab_size, "prompt_token_ids")
    assert text is not None
    return text, _encoded(text, encode, vocab_size)


def _both(prompt: Mapping[str, Any], encode: _Encode, vocab_size: int) -> tuple[str | None, list[int]]:
    if not set(prompt) <= set(_BOTH_KEYS) or prompt.get("encoder_prompt") is None:
        raise RequestError(
            f"prompt: an encoder-decoder's has the keys {' and '.join(_BOTH_KEYS)} and no others, and the "
            f"second may be left out; got {', '.join(map(str, prompt))}",
            "prompt",
        )
    text, ids = resolve_prompt(prompt["encoder_prompt"], encode, vocab_size)
    given = prompt.get("decoder_prompt")
    if given is None:
        return text, ids
    if isinstance(given, Mapping):
        given = given.get("prompt_token_ids")
    if given is None or isinstance(given, str):
        raise RequestError(
            "decoder_prompt: must be token ids: what a decoder begins with is seldom text", "decoder_prompt"
        )
    return text, BothPrompts(ids, _checked_ids(given, vocab_size, "decoder_prompt"))


def _encoded(text: str, encode: _Encode, vocab_size: int) -> list[int]:
    if not text:
        raise RequestError("prompt: must not be empty; give at least one token", "prompt")
    ids = encode(text)
    if not ids:
        raise RequestError(f"prompt: must not be empty, and {text!r} has no tokens", "prompt")
    beyond = next((i for i in ids if i >= vocab_size), None)
    if beyond is not None:
        raise RequestError(
            f"prompt: holds token {beyond}, which the tokenizer knows but the model does not: "
            f"it has {vocab_size} tokens",
            "prompt",
        )
    return ids


def _checked_ids(ids: Any, vocab_size: int, field: str) -> list[int]:
    """Token ids as plain ints. Any sequence or array of integers will do."""
    if hasattr(ids, "tolist"):  # an array, a tensor
        ids = ids.tolist()
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
        kind = "text or a list of" if field == "prompt" else "a list of"
        raise RequestError(f"{field}: must be {kind} token ids, got {type(ids).__name__}", field)
    if not ids:
        raise RequestError(f"{field}: must not be empty; give at least one token", field)
    return list(_integers(ids, vocab_size, field))


def _integers(ids: Sequence[Any], vocab_size: int, field: str) -> Iterator[int]:
    for index, value in enumerate(ids):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise RequestError(f"{field}[{index}]: must be an integer token id, got {value!r}", field)
        number = operator.index(value)
        if not 0 <= number < vocab_size:
            raise RequestError(
                f"{field}[{index}]: must be a token id from 0 to {vocab_size - 1}, got {number}", field
            )
        yield number
