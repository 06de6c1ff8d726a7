"""Prompts out of the command line, a JSONL file or stdin, all checked before a model is loaded.
Knows no engine.

A line of the file is an object with exactly one of ``prompt`` (text), ``prompt_token_ids`` and
``messages``, and any sampling fields, which win over the command line for that line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from shoal.errors import RequestError, UsageError
from shoal.sampling_params import SamplingParams

__all__ = ["PromptLine", "gather_prompts", "read_json_lines"]

Entry = TypeVar("Entry")

_KINDS = ("prompt", "prompt_token_ids", "messages")
_NOT_WRITTEN = "logprobs"  # a sampling field whose result the output has no place for


@dataclass(frozen=True)
class PromptLine:
    """One prompt and how to sample its answers."""

    given: str | list[int] | list[dict[str, Any]]  # as the user gave it
    params: SamplingParams
    is_chat: bool = False
    place: str = ""  # where it stands, for messages: "--input F: line 3: "

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation; only if ``is_chat``."""
        if isinstance(self.given, str):
            return [{"role": "user", "content": self.given}]
        return self.given  # type: ignore[return-value]


def gather_prompts(
    texts: Sequence[str], file: Path | None, stdin: TextIO | None, sampling: Mapping[str, Any], chat: bool
) -> list[PromptLine]:
    """All prompts, in order: those of the command line, then the file's.

    Args:
        texts: given with ``-p``.
        file: a JSONL file.
        stdin: read whole as one prompt if there is neither; None if it is a terminal.
        sampling: the sampling fields of the command line.
        chat: text is a user's message, to go through the chat template.

    Raises:
        UsageError: no prompt, or a wrong one; of a file, the message names the line.
    """
    params = SamplingParams(**sampling)
    lines = [PromptLine(text, params, chat) for text in texts]
    if file is not None:
        lines += _of_file(file, sampling, chat)
    if not texts and file is None:
        if stdin is None:
            raise UsageError("no prompt: give -p TEXT, --input FILE.jsonl, or text on stdin")
        lines = [PromptLine(_read_all(stdin), params, chat)]
    if not lines:
        raise UsageError(f"--input {file}: there is no prompt in it")
    for line in lines:
        if line.given == "":
            raise UsageError("the prompt is empty")
        if isinstance(line.given, str) and not _is_unicode(line.given):
            raise UsageError(f"the prompt is not valid Unicode: {line.given[:60]!r}")
    return lines


def _is_unicode(text: str) -> bool:
    """False with half a surrogate pair, which is how bytes that are not UTF-8 arrive in an argument."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_all(stdin: TextIO) -> str:
    try:
        return stdin.read().removesuffix("\n")  # echo's, not the prompt's
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin: not UTF-8: {error}") from None


def read_json_lines(file: Path, read: Callable[[Any], Entry]) -> Iterator[Entry]:
    """What ``read`` makes of each line of a JSONL file.

    Raises:
        UsageError: the file or a line cannot be read; the message names the line.
    """
    for _, entry in _numbered(file, read):
        yield entry


def _numbered(file: Path, read: Callable[[Any], Entry]) -> Iterator[tuple[int, Entry]]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"--input {file}: {error.strerror}") from None
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            try:
                yield number, read(json.loads(line))
            except (ValueError, RecursionError) as error:  # UsageError and JSONDecodeError are ValueErrors
                raise UsageError(f"--input {file}: line {number}: {error}") from None


def _of_file(file: Path, sampling: Mapping[str, Any], chat: bool) -> Iterator[PromptLine]:
    for number, line in _numbered(file, lambda entry: _of_line(entry, sampling, chat)):
        yield replace(line, place=f"--input {file}: line {number}: ")


def _of_line(entry: Any, sampling: Mapping[str, Any], chat: bool) -> PromptLine:
    if not isinstance(entry, dict):
        raise RequestError("must be a JSON object")
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise RequestError(f"must have exactly one of {', '.join(_KINDS)}")
    allowed = set(SamplingParams.field_names()) - {_NOT_WRITTEN}
    fields = {name: value for name, value in entry.items() if name not in _KINDS}
    for name in fields:
        if name not in allowed:
            raise RequestError(f"{name}: no such field; there are: {', '.join((*_KINDS, *sorted(allowed)))}")
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = {_token_id(key): value for key, value in fields["logit_bias"].items()}
    [kind] = kinds
    params = _params({**sampling, **fields})
    return PromptLine(
        _checked(kind, entry[kind]), params, is_chat=kind == "messages" or (chat and kind == "prompt")
    )


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**fields)
    except (
        TypeError
    ) as error:  # a value of a kind the checks cannot even look at, such as a number for a list
        raise RequestError(f"a sampling field is malformed: {error}") from None


def _token_id(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() else key  # what is no number is refused by name


def _checked(kind: str, value: Any) -> str | list[int] | list[dict[str, Any]]:
    if kind == "prompt":
        if isinstance(value, str) and value and _is_unicode(value):
            return value
        raise RequestError("prompt: must be text, not empty")
    if not isinstance(value, list) or not value:
        raise RequestError(f"{kind}: must be a list, not empty")
    if kind == "prompt_token_ids":
        if all(type(token) is int and 0 <= token < 2**31 for token in value):
            return value
        raise RequestError("prompt_token_ids: must be a list of token ids")
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise RequestError("messages: must be objects with a role and a content, both text")
    return value
