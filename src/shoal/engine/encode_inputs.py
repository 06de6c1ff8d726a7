"""Texts, pairs of texts and token ids made into what an encoder is given. Knows no engine and no task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.engine.prompts import listed_prompts, resolve_prompt
from shoal.engine.protocol import Prompt
from shoal.engine.text import Tokenizer
from shoal.errors import RequestError

__all__ = ["EncodeInput", "InputMaker"]


@dataclass(frozen=True, slots=True)
class EncodeInput:
    """One text's tokens."""

    token_ids: list[int]
    type_ids: tuple[int, ...] = ()  # none: all alike


class InputMaker:
    """Makes inputs, and refuses those that are too long unless they may be cut.

    Args:
        tokenizer: of the model.
        max_length: tokens that the model takes.
        is_lower: text is made lower case first.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, is_lower: bool = False) -> None:
        self.max_length = max_length
        self._tokenizer = tokenizer
        self._is_lower = is_lower

    def texts(self, prompts: Prompt | Sequence[Prompt], truncate: int | None = None) -> list[EncodeInput]:
        """Inputs of one prompt or several: text, ``{"prompt": text}``, token ids.

        Args:
            truncate: tokens that a text is cut to; -1: what the model takes; None: nothing is cut.

        Raises:
            RequestError: a prompt cannot be served; its ``index`` says which.
        """
        limit = self._limit(truncate)
        many = listed_prompts(prompts)
        if not many:
            raise RequestError("prompts: must not be empty", field="prompts")
        plain = {index: prompt for index, prompt in enumerate(many) if isinstance(prompt, str) and prompt}
        made: dict[int, EncodeInput] = {}
        if plain and self._tokenizer.is_present:
            found = self._tokenised(list(plain.values()), None, limit)
            made = dict(zip(plain, found, strict=True))
        inputs = []
        for index, prompt in enumerate(many):
            try:
                inputs.append(self._checked(made.get(index) or self._resolved(prompt, limit)))
            except RequestError as error:
                place = f"prompts[{index}]: " if len(many) > 1 else ""
                raise RequestError(f"{place}{error}", error.field, index) from error
        return inputs

    def pairs(
        self, first: Sequence[str], second: Sequence[str], truncate: int | None = None
    ) -> list[EncodeInput]:
        """Inputs of pairs of texts, as the tokenizer joins them.

        Raises:
            RequestError: a text is empty, or a pair too long.
        """
        limit = self._limit(truncate)
        for name, texts in (("text_1", first), ("text_2", second)):
            for index, text in enumerate(texts):
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name}[{index}]: must be text, not empty", field=name, index=index)
        return [self._checked(one) for one in self._tokenised(list(first), list(second), limit)]

    def _limit(self, truncate: int | None) -> int | None:
        if truncate is None:
            return None
        if (
            isinstance(truncate, bool)
            or not isinstance(truncate, int)
            or not (truncate > 0 or truncate == -1)
        ):
            raise RequestError(
                f"truncate_prompt_tokens: must be a number of tokens or -1, got {truncate!r}",
                field="truncate_prompt_tokens",
            )
        if truncate > self.max_length:
            raise RequestError(
                f"truncate_prompt_tokens: {truncate} is more than the model takes ({self.max_length})",
                field="truncate_prompt_tokens",
            )
        return self.max_length if truncate == -1 else truncate

    def _resolved(self, prompt: Prompt, limit: int | None) -> EncodeInput:
        _, ids = resolve_prompt(
            prompt, lambda text: self._tokenised([text], None, limit)[0].token_ids, self._tokenizer.vocab_size
        )
        return EncodeInput(ids[:limit])

    def _tokenised(
        self, texts: Sequence[str], others: Sequence[str] | None, limit: int | None
    ) -> list[EncodeInput]:
        backend = self._tokenizer.backend("prompt")
        if self._is_lower:
            texts = [text.lower() for text in texts]
            others = None if others is None else [text.lower() for text in others]
        cut: dict[str, Any] = {} if limit is None else {"truncation": True, "max_length": limit}
        try:
            found: Mapping[str, list[list[int]]] = backend(
                list(texts),
                others,
                add_special_tokens=True,
                return_attention_mask=False,
                verbose=False,
                **cut,
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"prompt: cannot be tokenised: {error}", "prompt") from error
        types = found.get("token_type_ids") or [[]] * len(found["input_ids"])
        return [
            EncodeInput(ids, tuple(own) if any(own) else ())
            for ids, own in zip(found["input_ids"], types, strict=True)
        ]

    def _checked(self, made: EncodeInput) -> EncodeInput:
        length = len(made.token_ids)
        if length > self.max_length:
            raise RequestError(
                f"prompt: has {length} tokens, which exceeds max_model_len ({self.max_length}); shorten it "
                "or pass truncate_prompt_tokens",
                field="prompt",
            )
        vocabulary = self._tokenizer.vocab_size
        if not made.token_ids or max(made.token_ids) >= vocabulary:
            raise RequestError(
                f"prompt: must have tokens, and none beyond the model's {vocabulary}", field="prompt"
            )
        return made
