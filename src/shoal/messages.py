"""All that crosses a process: plain data, encoded with msgpack. Knows no tensor and no socket.

The engine core sends one :class:`Step` to every rank; the rank that samples (rank 0) answers with a
:class:`StepResult`. A step is complete in itself: a rank needs its weights, its KV pages and the
step, and keeps nothing about a request between steps but the ids it sampled in the last one: they are
what a :data:`PLACEHOLDER_ID` in the next step stands for. Integer lists travel as native-endian int32
bytes (``array('i').tobytes()``), which costs a copy and no per-number work. What comes once per branch
leaves its defaults out, which halves the bytes, and is not tracked by the garbage collector: it holds
plain data, so there are no cycles.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

__all__ = [
    "PLACEHOLDER_ID",
    "AllocateKV",
    "Encode",
    "Failure",
    "LoadProgress",
    "Message",
    "Ping",
    "RankReady",
    "RankReport",
    "SamplingSpec",
    "SequenceStep",
    "Shutdown",
    "Start",
    "Step",
    "StepResult",
    "TokenResult",
    "decode",
    "encode",
    "pack_ids",
    "unpack_ids",
]

PLACEHOLDER_ID = -1
"""As a sequence's only token in a step, and the last of its history: the one that the step before sampled."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Integers as native-endian int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """The inverse of :func:`pack_ids`, as an ``array('i')``."""
    out = array("i")
    out.frombytes(data)
    return out


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How one branch is sampled, every default already filled in. Fixed at admission."""

    temperature: float  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0  # no run of so many tokens twice; 0: off
    seed: int = 0  # unsigned 64 bit; noise is a function of (seed, branch, position)
    branch: int = 0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # end-of-sequence and stop tokens: barred before min_tokens
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: and the k most likely
    logit_bias: dict[int, float] | None = None
    num_candidates: int = 0  # of a beam: its so many most likely tokens are wanted, edits applied

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.no_repeat_ngram_size > 0
        )


class SequenceStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One branch's share of a step.

    Computes the tokens at positions ``start .. start + len(token_ids)``; all earlier positions are
    already in its KV pages, or in its state. Position p lives in slot ``p % block_size`` of block
    ``block_ids[p // block_size]``; in layers that see a window and have blocks of their own, of block
    ``window_block_ids[p // block_size - window_base]``, if the window reaches that far back.
    """

    sequence_id: int  # unique in the engine's life
    start: int
    token_ids: bytes  # int32; at least one; PLACEHOLDER_ID alone for the token sampled in the step before
    block_ids: bytes  # int32; enough blocks for start + len(token_ids) positions
    window_block_ids: bytes = b""  # int32; empty: all layers have the same blocks
    window_base: int = 0  # so many leading blocks are gone
    slot: int = -1  # where its state is, of models that keep one; a share that starts at 0 begins a new state
    sampling: SamplingSpec | None = None  # None: a chunk of a prompt, nothing is sampled
    num_output: int = 0  # output tokens so far, for min_tokens
    history: bytes = b""  # int32; prompt then output ids, only if sampling.needs_history
    num_prompt: int = 0  # how many ids of history are the prompt's
    num_encoder: int = 0  # tokens of the encoder's input, of encoder-decoders
    cross_block_ids: bytes = b""  # int32; where what cross-attention keeps of them is
    encoder_ids: bytes = b""  # int32; the encoder's input, in the branch's first step: to be encoded in it
    forced_id: int = -1  # the only token that may be sampled; -1: any


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One step for every rank: one ragged batch."""

    step_id: int
    sequences: tuple[SequenceStep, ...]


class TokenResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What was sampled for one branch; or why that branch alone failed."""

    sequence_id: int
    token_id: int = -1
    logprob: float | None = None  # of the chosen token, from the raw logits (natural log)
    rank: int | None = None  # the chosen token's place by raw logit, 1 is the most likely
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    error: str | None = None


class Encode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="encode"):
    """A step of an encoder: whole texts, of which nothing is kept."""

    step_id: int
    token_ids: bytes  # int32, text after text
    lengths: bytes  # int32, one a text
    output: str  # "mean", "cls", "last": a vector a text; "classes"; "token_classes"; "words"
    type_ids: bytes = b""  # int32, one a token; empty: none given
    wanted: bytes = b""  # int32: of all tokens those whose words are wanted
    top_k: int = 0  # most likely words of each


class StepResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="result"):
    """A rank's answer to a step; ranks that do not sample send neither tokens nor rows."""

    step_id: int
    tokens: tuple[TokenResult, ...] = ()
    compute_s: float = 0.0
    rows: bytes = b""  # float32, ``width`` each: what an :class:`Encode` asked for
    width: int = 0
    ids: bytes = b""  # int32, as many as rows hold numbers: the words that have these scores


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a rank: what to build."""

    rank: int
    world_size: int
    config: dict[str, Any]  # EngineConfig as plain data
    model_path: str
    plan: dict[str, Any]  # Plan as plain data
    rendezvous: str  # host:port of the group's store; empty when world_size is 1
    generation: int = 0


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far a rank's loading is; any number of them come before its report."""

    done: float
    total: float


class RankReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """What a rank measured after loading (DESIGN: what memory means)."""

    rank: int
    weight_bytes: int  # unique storages of parameters, buffers and packed kernels
    bytes_read: int  # from checkpoint files
    load_s: float
    kv_bytes_per_token: int
    kv_budget_bytes: int  # what this rank can give to KV pages
    step_s: float = 0.0  # that the largest step takes, about; 0: not measured
    private_growth_bytes: int = 0  # smaps_rollup, before load to after load
    peak_growth_bytes: int = 0  # VmHWM less its value before load
    attention: str = ""  # the kernel chosen
    dtype: str = ""
    way: str = "paged"  # how the model is served; "recompute": nothing is kept, every step brings all tokens
    state_bytes: int = 0  # per sequence, whatever its length
    window: int = 0  # positions that layers see, which need keep no more; 0: there are none
    window_bytes_per_token: int = 0  # of kv_bytes_per_token, what these layers take
    makes_vectors: bool = True  # of each token; False: an encoder of which only the head answers
    notes: tuple[str, ...] = ()


class AllocateKV(msgspec.Struct, frozen=True, kw_only=True, tag="allocate"):
    """The second message: how many blocks every rank keeps, and how many states.

    Layers that see a window keep ``num_window_blocks``, or as many as all others if that is 0.
    """

    num_blocks: int
    block_size: int
    num_window_blocks: int = 0
    num_slots: int = 0
    step_timeout_s: float = 0.0  # of the steps that follow; 0: as the configuration says


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Pages allocated, warmed up, steps may come."""

    rank: int
    kv_bytes: int
    private_growth_bytes: int = 0  # smaps_rollup, before load to after the first step, less KV pages


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """A rank could not do what it was sent."""

    rank: int
    kind: str  # the exception's class name
    message: str
    traceback: str = ""
    usage: bool = False  # the user's input was wrong (UsageError)
    field: str | None = None


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Is anybody there? Answered with the same, in its turn."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Stop serving and exit with status 0."""


Message = (
    Start
    | LoadProgress
    | RankReport
    | AllocateKV
    | RankReady
    | Step
    | Encode
    | StepResult
    | Failure
    | Ping
    | Shutdown
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A message as msgpack bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message in ``data``.

    Raises:
        msgspec.DecodeError: not one of ours.
    """
    return _decoder.decode(data)
