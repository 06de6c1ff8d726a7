"""Token ids to text, a token at a time, text that is given out being final. Knows no stop strings.

A tokenizer's text is not the sum of its tokens' texts: a character may be several byte tokens, the
first word loses its space. So a short window of tokens is decoded, and what is new beyond the
characters already given is given (the method of text-generation-inference and vLLM, with the window's
start moved to the last clean boundary). Each token costs one decode of a few tokens, or two, however long
the text is.

The pieces add up to ``tokenizer.decode(all ids, clean_up_tokenization_spaces=False)``. Exceptions, all
where a decoder goes back on text it has shown: with byte fallback (Llama 2), a run of byte tokens that
is valid UTF-8 at first and not in the end is decoded as all U+FFFD, of which the valid beginning was
given out as its characters.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.engine.text import Tokenizer

__all__ = ["Detokeniser"]

# A character has at most four bytes, so that three tokens may wait for a fourth. Text that still ends
# unfinished after this many tokens is broken, and given out but for its last characters.
_MOST_PENDING = 16
_MOST_HELD = 3  # characters U+FFFD that a fourth byte could turn into one character
_KEPT = 12  # tokens: covers the held characters and what is needed to decode them alike


class Detokeniser:
    """The text of one branch as it grows.

    Args:
        tokenizer: the model's.
        skip_special_tokens: special tokens leave no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ignored = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._num_known = tokenizer.num_known
        self._joiner = tokenizer.word_joiner
        # Text that ends in none of these is finished, and needs no second look.
        self._unfinished = ("\ufffd", self._joiner) if self._joiner else ("\ufffd",)
        self._window: list[int] = []  # the last tokens given out, then those pending
        self._num_given = 0  # characters of the window's text already given out
        self._num_pending = 0  # tokens at the window's end whose text is not given out

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; returns the text that became final, never part of a character."""
        return "".join(map(self.push_one, token_ids))

    def push_one(self, token: int) -> str:
        """The same for one token."""
        if token in self._ignored or not 0 <= token < self._num_known:
            return ""  # leaves no text, now or later
        self._window.append(token)
        self._num_pending += 1
        text = self._decode()
        held = self._num_unfinished(text) if text.endswith(self._unfinished) else 0
        must_move = self._num_pending > _MOST_PENDING
        if held and not must_move:
            return ""
        new = text[self._num_given : len(text) - held]
        if new or must_move:
            self._move_window(held)
        return new

    def finish(self) -> str:
        """The rest of the text, with U+FFFD for what stayed incomplete. Nothing may be pushed after."""
        rest = self._decode()[self._num_given :]
        self._window, self._num_given, self._num_pending = [], 0, 0
        return rest

    def _decode(self) -> str:
        window = self._window
        return self._tokenizer.decode_known(window, self._skip_special_tokens) if window else ""

    def _num_unfinished(self, text: str) -> int:
        """How many characters at the end of ``text``, which looks unfinished, a next token may change."""
        num_broken = len(text) - len(text.rstrip("\ufffd"))
        if not num_broken:
            return len(self._joiner)
        return min(num_broken, _MOST_HELD)

    def _move_window(self, held: int) -> None:
        """Forget tokens that decoding the next ones does not need; ``held`` characters stay to give."""
        self._window = self._window[-_KEPT if held else -self._num_pending :]
        if len(self._window) == 1:
            length = self._tokenizer.length_alone(self._window[0], self._skip_special_tokens)
        else:
            length = len(self._decode())
        self._num_given = max(length - held, 0)
        self._num_pending = 0
