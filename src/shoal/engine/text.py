"""A model's tokenizer as the engine uses it: text to ids, conversations to ids, ids to text.

A thin wrapper of transformers' tokenizer, or of none: a folder without tokenizer files serves prompts
of token ids, and everything that needs text is refused by name. Knows no request, no sampling and no
streaming (:mod:`shoal.engine.detokenise`).
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.engine.prompts import resolve_prompt
from shoal.engine.protocol import Prompt
from shoal.errors import CheckpointError, RequestError

__all__ = ["Tokenizer"]

_log = logging.getLogger("shoal.engine")

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*bpe.codes",
)
_NO_LENGTH = 1 << 30  # transformers has a larger number stand for none
# Arguments of apply_chat_template that are ours to set: a request may not replace the template, nor
# change what comes back.
_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


class Tokenizer:
    """Text to ids and back, for one model.

    Args:
        backend: a transformers tokenizer, or None for a model without one.
        vocab_size: the model's number of token embeddings: what a prompt's ids must lie below.
    """

    def __init__(self, backend: Any | None, *, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._token_texts: dict[int, str] = {}
        self._lengths: tuple[dict[int, int], dict[int, int]] = ({}, {})  # special tokens kept, and skipped

    @classmethod
    def load(cls, folder: str | Path, trust_remote_code: bool = False, *, vocab_size: int) -> Tokenizer:
        """The tokenizer of a local model folder; without tokenizer files, one that only knows ids.

        Raises:
            CheckpointError: there are tokenizer files, and transformers cannot load them.
        """
        names = [path.name for path in Path(folder).iterdir()]
        if not any(fnmatch.fnmatch(name, pattern) for name in names for pattern in _TOKENIZER_FILES):
            _log.warning("no tokenizer in %s: only prompts of token ids are served, without text", folder)
            return cls(None, vocab_size=vocab_size)
        from transformers import AutoTokenizer  # costs seconds; not needed for the faces' --help

        try:
            backend = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        # Tokenizer classes raise whatever their parsers raise; to the user each means the same.
        except Exception as error:
            raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
        return cls(backend, vocab_size=vocab_size)

    @property
    def is_present(self) -> bool:
        """Whether there is text at all."""
        return self._backend is not None

    @property
    def has_chat_template(self) -> bool:
        return self._backend is not None and bool(getattr(self._backend, "chat_template", None))

    @property
    def vocab_size(self) -> int:
        """The model's number of tokens."""
        return self._vocab_size

    @cached_property
    def num_known(self) -> int:
        """The largest id that has text, plus one; 0 without a tokenizer.

        Less than ``vocab_size`` where the embeddings are padded, more where tokens were added to the
        tokenizer alone.
        """
        return 1 + max(self._backend.get_vocab().values(), default=-1) if self._backend else 0

    @property
    def model_max_length(self) -> int | None:
        """Tokens that the tokenizer's files say the model takes; None: they do not say."""
        length = getattr(self._backend, "model_max_length", None)
        return int(length) if length is not None and length < _NO_LENGTH else None

    @property
    def mask_token_id(self) -> int | None:
        """What stands for a word that is to be guessed."""
        return getattr(self._backend, "mask_token_id", None)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end of sequence; generation configs come first (``eos_token_ids``)."""
        return getattr(self._backend, "eos_token_id", None)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: so many times the tokens that fit is all a prompt can hold."""
        return max(map(len, self._backend.get_vocab()), default=1) if self._backend else 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that leave no text when special tokens are skipped."""
        if self._backend is None:
            return frozenset()
        added = getattr(self._backend, "added_tokens_decoder", {})
        listed = set(self._backend.all_special_ids) | {i for i, token in added.items() if token.special}
        return frozenset(i for i in listed if not self.decode([i], skip_special_tokens=True))

    @cached_property
    def word_joiner(self) -> str:
        """``"@@"`` in tokenizers of the subword-nmt kind (CTRL), whose decoders show it at the end of
        text and drop it when the word goes on; else empty.
        """
        vocab = self._backend.get_vocab() if self._backend else {}
        token = next((i for text, i in vocab.items() if text.endswith("@@")), None)
        if token is None:
            return ""
        alone, twice = self.decode([token], False), self.decode([token, token], False)
        return "" if twice.startswith(alone) else "@@"

    def encode(self, text: str, field: str = "prompt") -> list[int]:
        """Token ids, with the special tokens transformers adds by default.

        Args:
            text: any text without unpaired surrogates.
            field: the request field to name in errors.

        Raises:
            RequestError: no tokenizer, or text that is not valid Unicode.
        """
        return self._tokenise(text, field, add_special_tokens=True)

    def _tokenise(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        backend = self.backend(field)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError(f"{field}: contains unpaired surrogates, not valid Unicode", field) from None
        encoded = backend(text, add_special_tokens=add_special_tokens, verbose=False)
        return [int(token) for token in encoded["input_ids"]]

    def backend(self, field: str) -> Any:
        """transformers' tokenizer.

        Raises:
            RequestError: there is none, and ``field`` needs it.
        """
        if self._backend is None:
            raise RequestError(
                f"{field}: this model has no tokenizer; pass token ids as prompt_token_ids", field
            )
        return self._backend

    def resolve_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text (if any was given) and the token ids of a prompt: :mod:`shoal.engine.prompts`.

        Raises:
            RequestError: empty, of the wrong type, ids out of range, or text without a tokenizer.
        """
        return resolve_prompt(prompt, self.encode, self._vocab_size)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of ``ids``, spaces left as they are. Ids the tokenizer does not know have no text."""
        if self._backend is None:
            return ""
        known = self.num_known
        return self.decode_known([i for i in ids if 0 <= i < known], skip_special_tokens)

    @cached_property
    def decode_known(self) -> Callable[[list[int], bool], str]:
        """:meth:`decode` for ids that are known to be known, and to a tokenizer that is there.

        What transformers wraps around the tokenizers library takes ten times as long as the library does for
        a token or two, so it is left out where the tokenizer's class adds nothing of its own.
        """
        backend: Any = self._backend
        if hasattr(backend, "backend_tokenizer"):
            from transformers import PreTrainedTokenizerFast as Plain  # it is loaded: the tokenizer is its

            kind, raw = type(backend), backend.backend_tokenizer
            if kind.decode is Plain.decode and kind._decode is Plain._decode:
                return lambda ids, skip: raw.decode(ids, skip_special_tokens=skip)
        return lambda ids, skip: backend.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )

    def length_alone(self, token_id: int, skip_special_tokens: bool) -> int:
        """Characters of one token decoded alone; kept, since it is asked for with every token of a text."""
        lengths = self._lengths[skip_special_tokens]
        length = lengths.get(token_id)
        if length is None:
            length = lengths[token_id] = len(self.decode((token_id,), skip_special_tokens))
        return length

    def decode_token(self, token_id: int) -> str:
        """What one token adds to running text, for logprobs; U+FFFD for part of a character.

        Decoded behind another token, so that the space a word begins with is there.
        """
        if token_id not in self._token_texts:
            before = self._anchor
            head = self.decode(before, False)
            both = self.decode([*before, token_id], False)
            alone = both[len(head) :] if both.startswith(head) else self.decode([token_id], False)
            self._token_texts[token_id] = alone
        return self._token_texts[token_id]

    @cached_property
    def _anchor(self) -> list[int]:
        return self._tokenise("a", "prompt", add_special_tokens=False) if self._backend else []

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Prompt ids of a conversation: :meth:`encode_chat` of its :meth:`chat_text`."""
        return self.encode_chat(
            self.chat_text(messages, add_generation_prompt=add_generation_prompt, **template_kwargs)
        )

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """A conversation as one text, by the model's own chat template.

        Args:
            messages: each with a ``role``, and ``content`` as text or as text parts
                (``[{"type": "text", "text": ...}]``, joined by newlines as vLLM does).
            add_generation_prompt: end with the header of the assistant's turn.
            template_kwargs: more variables for the template (``tools``, ``enable_thinking`` ...).

        Raises:
            RequestError: no tokenizer, no chat template, or the template refuses the messages.
        """
        backend = self.backend("messages")
        if not self.has_chat_template:
            raise RequestError(
                "messages: this model has no chat template; send a prompt to completions instead", "messages"
            )
        taken = sorted(_RESERVED_TEMPLATE_ARGUMENTS & template_kwargs.keys())
        if taken:
            raise RequestError(f"chat_template_kwargs: {taken[0]} cannot be set", "chat_template_kwargs")
        plain = _plain_messages(messages)
        try:
            text: str = backend.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
            )
        # A template is the model's own program: what it raises, of any kind, is its refusal.
        except Exception as error:
            raise RequestError(f"messages: the chat template refuses them: {error}", "messages") from error
        return text

    def encode_chat(self, text: str) -> list[int]:
        """Prompt ids of what :meth:`chat_text` gave.

        Raises:
            RequestError: there are none, or it is not valid Unicode.
        """
        # The template writes the special tokens itself.
        ids = self._tokenise(text, "messages", add_special_tokens=False)
        if not ids:
            raise RequestError("messages: the chat template makes no tokens of them", "messages")
        return ids


def _refused(place: str, message: str) -> RequestError:
    return RequestError(f"{place}: {message}", field="messages")


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as plain dicts whose content is text (or None, as beside tool calls)."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _refused("messages", f"must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise _refused("messages", "must not be empty")
    return [_plain_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain_message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refused(place, f"must be an object with role and content, got {type(message).__name__}")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise _refused(f"{place}.role", 'must be a non-empty string such as "user"')
    plain = dict(message)
    content = plain.get("content")
    if content is not None and not isinstance(content, str):
        plain["content"] = _joined_parts(f"{place}.content", content)
    return plain


def _joined_parts(place: str, parts: Any) -> str:
    if isinstance(parts, (bytes, Mapping)) or not isinstance(parts, Sequence):
        raise _refused(place, f"must be text or a list of text parts, got {type(parts).__name__}")
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise _refused(f"{place}[{index}]", f"only text parts are supported, got type {kind!r}")
        if not isinstance(part.get("text"), str):
            raise _refused(f"{place}[{index}].text", "must be a string")
        texts.append(part["text"])
    return "\n".join(texts)
