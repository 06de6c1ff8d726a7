"""One request as the scheduler sees it: a spec that comes in, a branch that runs, an update that goes out.

Knows no queue, no budget and no text. There is no prefill phase and no decode phase: a branch has
``num_computed`` of its ``num_tokens`` tokens in the KV pages, and a step brings the two closer::

    | prompt                                        | output so far |
    0 ... num_computed ... num_scheduled ...        num_prompt      num_tokens

A step that reaches ``num_tokens`` samples, and the sampled token makes it one longer. While it is in flight,
``num_scheduled`` equals ``num_tokens``, and the next step may compute a placeholder for that token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from msgspec import structs

from shoal.cache.manager import SequenceBlocks
from shoal.messages import PLACEHOLDER_ID, SamplingSpec, SequenceStep, TokenResult, pack_ids
from shoal.sched.beams import BeamGroup, BeamSpec

__all__ = ["BranchUpdate", "Request", "RequestSpec", "Status"]

_PLACEHOLDER = pack_ids([PLACEHOLDER_ID])


class Status(Enum):
    """Where a branch is."""

    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a caller wants scheduled."""

    request_id: str  # unique among unfinished requests
    prompt_ids: Sequence[int]
    sampling: tuple[SamplingSpec, ...]  # one per branch, in branch order
    max_tokens: int | None = None  # per branch; None: as many as fit
    eos_ids: frozenset[int] = frozenset()  # end of sequence: stop_reason None
    stop_ids: frozenset[int] = frozenset()  # the request's stop_token_ids: stop_reason is the id
    ignore_eos: bool = False
    cache_salt: bytes = b""  # prefixes are shared only under the same salt
    encoder_ids: Sequence[int] = ()  # an encoder's input; ``prompt_ids`` then begin the decoder's sequence
    forced_first_id: int = -1  # the only first output token there may be; -1: any
    forced_last_id: int = -1  # the same for the one at max_tokens
    beams: BeamSpec | None = None  # a search; ``sampling`` then has one branch per beam


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One branch of a request. The scheduler owns it; others read it."""

    sequence_id: int  # rises in order of arrival
    request_id: str
    sampling: SamplingSpec
    token_ids: array[int]  # prompt, then output
    num_prompt: int
    max_tokens: int  # capped so that the whole sequence fits
    eos_ids: frozenset[int]  # empty if the request ignores them
    stop_ids: frozenset[int]
    blocks: SequenceBlocks
    leader: Request | None = None  # the branch that computes the prompt whose blocks this one shares
    num_shared: int = 0  # leading prompt tokens to be had from the leader; whole blocks
    encoder_ids: array[int] = field(default_factory=lambda: array("i"))  # what its encoder reads
    forced_first_id: int = -1  # the only first output token there may be; -1: any
    forced_last_id: int = -1  # the same for the one at max_tokens
    group: BeamGroup | None = None  # whose beam it is

    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose KV is in the blocks, as far as steps were answered
    num_scheduled: int = 0  # the same, once all steps in flight are answered
    num_flights: int = 0  # steps in flight that it has a share in
    is_parked: bool = False  # nothing is to be computed until its group has chosen
    encodes_at: int = -1  # where the share starts that brings the encoder's input too; -1: none does
    num_cached: int | None = None  # prompt tokens it did not have to compute; None: not started yet
    num_preemptions: int = 0
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None
    ending_ids: frozenset[int] = field(init=False)
    needs_history: bool = field(init=False)

    def __post_init__(self) -> None:
        self.ending_ids = self.eos_ids | self.stop_ids
        self.needs_history = self.sampling.needs_history

    @property
    def branch(self) -> int:
        """Its index among the request's branches."""
        return self.sampling.branch

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_input(self) -> int:
        """Tokens that the caller is told it asked with: the encoder's, of encoder-decoders."""
        return len(self.encoder_ids) or self.num_prompt

    @property
    def num_led(self) -> int:
        """Tokens that its leader computes before it can start on what they share."""
        return max(self.num_shared, 1) if self.encoder_ids else self.num_shared

    @property
    def is_ending(self) -> bool:
        """Its last token is being sampled, whatever that will be."""
        num_tokens = len(self.token_ids)
        return self.num_scheduled >= num_tokens and num_tokens - self.num_prompt + 1 >= self.max_tokens

    @property
    def prompt_ids(self) -> array[int]:
        """A copy of the prompt's ids."""
        return self.token_ids[: self.num_prompt]

    @property
    def output_ids(self) -> array[int]:
        """A copy of the output's ids, the stop token included."""
        return self.token_ids[self.num_prompt :]

    def step(self, count: int) -> SequenceStep:
        """Its share of a step that computes the next ``count`` tokens, and samples after the last.

        What is computed behind its last token is the placeholder of the one that is being sampled.
        """
        share = self._share(count)
        return self._with_encoder(share) if self.encoder_ids else share

    def _with_encoder(self, share: SequenceStep) -> SequenceStep:
        """The share and the encoder's side of it."""
        return structs.replace(
            share,
            num_encoder=len(self.encoder_ids),
            cross_block_ids=self.blocks.cross_ids.tobytes(),
            encoder_ids=self.encoder_ids.tobytes() if share.start == self.encodes_at else b"",
            forced_id=self._forced_id(share.num_output) if share.sampling is not None else -1,
        )

    def _share(self, count: int) -> SequenceStep:
        start = self.num_scheduled
        end = start + count
        token_ids, blocks = self.token_ids, self.blocks
        if end < len(token_ids):
            return SequenceStep(
                sequence_id=self.sequence_id,
                start=start,
                token_ids=token_ids[start:end].tobytes(),
                block_ids=blocks.block_ids.tobytes(),
                window_block_ids=blocks.window_ids.tobytes(),
                window_base=blocks.window_base,
                slot=blocks.slot,
            )
        awaited = _PLACEHOLDER if end > len(token_ids) else b""
        return SequenceStep(
            sequence_id=self.sequence_id,
            start=start,
            token_ids=awaited or token_ids[start:end].tobytes(),
            block_ids=blocks.block_ids.tobytes(),
            window_block_ids=blocks.window_ids.tobytes(),
            window_base=blocks.window_base,
            slot=blocks.slot,
            sampling=self.sampling,
            num_output=end - self.num_prompt,
            history=token_ids.tobytes() + awaited if self.needs_history else b"",
            num_prompt=self.num_prompt if self.needs_history else 0,
        )

    def _forced_id(self, num_output: int) -> int:
        """The only token that may follow ``num_output`` output tokens; -1: any."""
        if num_output == 0 and self.forced_first_id >= 0:
            return self.forced_first_id
        return self.forced_last_id if num_output + 1 == self.max_tokens else -1

    def become(self, other: Request, token_id: int, shares_blocks: bool, block_size: int) -> None:
        """Go on from what ``other``, a beam of the same group, has, with a token of its own."""
        assert self.status is Status.WAITING and not self.blocks.block_ids
        self.token_ids = other.token_ids[:]
        self.token_ids.append(token_id)
        blocks = other.blocks
        self.blocks = SequenceBlocks(self.token_ids, blocks.salt, num_encoder=blocks.num_encoder)
        self.leader = other
        self.num_shared = other.num_computed // block_size * block_size if shares_blocks else 0
        self.is_parked = False

    def end(self) -> tuple[str, int | None] | None:
        """Finish reason and stop reason if the last output token ends the branch, by vLLM's rules.

        The end of a sequence comes before a stop token, and both before the length; before
        ``min_tokens`` neither of the two counts.
        """
        token_id = self.token_ids[-1]
        num_output = len(self.token_ids) - self.num_prompt
        if token_id in self.ending_ids and num_output >= self.sampling.min_tokens:
            return ("stop", None) if token_id in self.eos_ids else ("stop", token_id)
        return ("length", None) if num_output >= self.max_tokens else None


@dataclass(slots=True)
class BranchUpdate:
    """What an answered step brought one branch: a token, an end, or both."""

    request: Request
    token: TokenResult | None = None  # None with an error
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # set with finish_reason "error"

    @property
    def token_ids(self) -> list[int]:
        """The new output ids."""
        return [] if self.token is None else [self.token.token_id]
