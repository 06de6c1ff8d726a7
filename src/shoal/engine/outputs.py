"""What a caller gets back. Plain data with vLLM's names; knows nothing of how it came about."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionDelta",
    "CompletionOutput",
    "RequestDelta",
    "RequestOutput",
    "TokenLogprob",
]


@dataclass(slots=True)
class TokenLogprob:
    """One candidate token at one position."""

    logprob: float  # natural log, from the raw logits; of beams after all edits: what the search adds up
    rank: int | None = None  # 1 is the most likely
    decoded_token: str = ""


@dataclass(slots=True)
class CompletionOutput:
    """One branch of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, TokenLogprob]] | None = None  # per token; the chosen token comes first
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop string or stop token id; None for end of sequence
    error: str | None = None  # set with finish_reason "error"


@dataclass(slots=True)
class RequestOutput:
    """One request, all its branches."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache


@dataclass(slots=True)
class CompletionDelta:
    """What one branch gained since the last delta."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, TokenLogprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # set with finish_reason "error"


@dataclass(slots=True)
class RequestDelta:
    """What one request gained since the last delta."""

    request_id: str
    outputs: list[CompletionDelta]
    finished: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that a search has found."""

    tokens: list[int]  # prompt and output, with what ended it; of an encoder-decoder the output alone
    logprobs: list[dict[int, TokenLogprob]]  # of each output token and its likeliest rivals
    cum_logprob: float
    text: str | None  # of the tokens; None without a tokenizer
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What :meth:`shoal.LLM.beam_search` has found for one prompt."""

    sequences: list[BeamSearchSequence]  # as many as beams, the best first
