"""Request bodies: OpenAI's fields and vLLM's further sampling fields, checked strictly. Knows no engine.

A field that is null counts as absent. What is wrong is a ``RequestError`` naming the field; ranges of
the sampling fields are ``SamplingParams``' own checks. How many items a field may hold is checked before
anything looks at each.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams
from shoal.server.unsupported import refuse_unsupported

__all__ = [
    "ChatRequest",
    "CheckedRequest",
    "CompletionRequest",
    "GenerationRequest",
    "StreamOptions",
    "parse",
]

_MOST_BRANCHES = 128  # OpenAI's limit of n
_MOST_LOGPROBS = 20
_MOST_STOP_CHARACTERS = 1024  # of one stop string
_MOST_ITEMS = {"messages": 16384, "stop": 64, "stop_token_ids": 1024, "logit_bias": 1024}
# Fields of a JSON text take a microsecond each to read, lists half of one, items of a list 50 ns, and nobody
# else is served meanwhile. Characters that may begin or separate them are counted in no time.
_MOST_OF = (("fields", b":", 100_000), ("lists", b"[", 100_000), ("items", b",", 1_000_000))
_MOST_FIELDS = 1000  # of the body itself

Request_ = TypeVar("Request_", bound="CheckedRequest")


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False  # one last chunk with usage and no choices
    continuous_usage_stats: bool = False  # vLLM's: usage so far in every chunk


class CheckedRequest(BaseModel):
    """Any request's body."""

    def check(self) -> None:
        """Refuse what no single field's type tells.

        Raises:
            RequestError: ``field`` names the field at fault.
        """


class GenerationRequest(CheckedRequest):
    """What completions and chat share."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=_MOST_BRANCHES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    forced_bos_token_id: int | None = None
    num_beams: int = 1  # above 1: beam search as in transformers; n of them are answers
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    use_beam_search: bool = False  # vLLM's: as many beams as answers
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool = True
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # seconds from arrival

    @property
    def wants_usage(self) -> bool:
        """A stream ends in a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        """Every chunk of a stream carries the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling_params(self) -> SamplingParams:
        """The engine's view of this request.

        Raises:
            RequestError: a value out of its range; ``field`` names it.
        """
        shared = {name: getattr(self, name) for name in _SHARED_SAMPLING_FIELDS}
        if self.use_beam_search and self.num_beams == 1:
            shared["num_beams"] = self.n
        return SamplingParams(**shared, **self.own_sampling_fields(), logit_bias=_token_bias(self.logit_bias))

    def own_sampling_fields(self) -> dict[str, Any]:
        """``max_tokens`` and ``logprobs``, which the two kinds of request name differently."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse what no single field's type tells.

        Raises:
            RequestError: ``field`` names the field at fault.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only allowed when stream is true", field="stream_options")
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if any(len(stop) > _MOST_STOP_CHARACTERS for stop in stops):
            raise RequestError(
                f"stop: at most {_MOST_STOP_CHARACTERS} characters each, got {max(map(len, stops))}",
                field="stop",
            )


_SHARED_SAMPLING_FIELDS = tuple(
    name
    for name in GenerationRequest.model_fields
    if name in SamplingParams.field_names() and name != "logit_bias"
)


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Any  # text, token ids, or a list of either; see server.completions
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOGPROBS)
    echo: bool = False
    best_of: int | None = None
    return_token_ids: bool = False  # vLLM's: each choice has the ids that its text stands for

    def own_sampling_fields(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "logprobs": self.logprobs}

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError(
                f"best_of: must equal n ({self.n}) or be left out: ranking extra branches is not supported",
                field="best_of",
            )
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "echo: cannot be combined with logprobs: logprobs of the prompt are not supported",
                field="echo",
            )


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)  # contents: see server.chat
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    def own_sampling_fields(self) -> dict[str, Any]:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {"max_tokens": limit, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs: only allowed when logprobs is true", field="top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                "max_tokens: differs from max_completion_tokens; give one of them", field="max_tokens"
            )


def _token_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are strings: ``{"50256": -100}``."""
    if bias is None:
        return None
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"logit_bias: keys must be token ids, got {key[:40]!r}", field="logit_bias")
    return {int(key): value for key, value in bias.items()}


def parse(kind: type[Request_], data: bytes) -> Request_:
    """A checked request out of a body.

    Raises:
        RequestError: not JSON, not an object, or a field that is wrong; ``field`` names it.
        UnsupportedError: a field asks for what shoal does not have.
    """
    for kind_of, character, most in _MOST_OF:
        if (count := data.count(character)) > most:
            raise RequestError(
                f"the body holds too many {kind_of}: at most {most} of {character.decode()!r}, got {count}"
            )
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {reprlib.repr(body)}")
    if len(body) > _MOST_FIELDS:
        raise RequestError(f"the body has too many fields: at most {_MOST_FIELDS}, got {len(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    refuse_unsupported({name: value for name, value in given.items() if name not in kind.model_fields})
    for name, most in _MOST_ITEMS.items():
        value = given.get(name)
        if isinstance(value, (list, dict)) and len(value) > most:
            raise RequestError(f"{name}: at most {most} items, got {len(value)}", field=name)
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _field_error(error) from None
    request.check()
    return request


def _field_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    location = first["loc"]
    field = str(location[0])
    if field == "messages" and len(location) > 1:  # as server.chat names them
        field = f"messages[{location[1]}]"
    if first["type"] == "missing":
        return RequestError(f"{field}: missing", field=field)
    message = first["msg"].removeprefix("Input ")
    return RequestError(f"{field}: {message}, got {reprlib.repr(first['input'])}", field=field)
