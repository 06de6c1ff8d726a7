"""From what a caller wants to branches that can be served, or a refusal. Knows no queue and no state."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from shoal.cache.manager import SequenceBlocks
from shoal.cache.spec import WindowSpec
from shoal.errors import QueueFullError, RequestError
from shoal.sched.beams import BeamGroup, BeamSpec
from shoal.sched.request import Request, RequestSpec

__all__ = ["Limits", "QueueBounds", "make_branches"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one sequence."""

    max_model_len: int  # tokens, prompt and output
    num_blocks: int
    block_size: int  # tokens per block
    shares_blocks: bool = True  # whether one sequence can go on from what another has computed
    max_num_seqs: int = 1 << 30  # running at once
    max_encoder_len: int = 0  # tokens of an encoder's input; 0: there is no encoder
    window: WindowSpec | None = None  # of layers that see one, and have blocks of their own
    max_num_batched_tokens: int = 1 << 30  # of a step

    def for_beams(self, num_beams: int) -> Limits:
        """What is left to each of a search's beams.

        Raises:
            RequestError: they can never all be there at once.
        """
        if num_beams > self.max_num_seqs:
            raise RequestError(
                f"num_beams: {num_beams} beams run side by side, and max_num_seqs is {self.max_num_seqs}; "
                "search with fewer",
                field="num_beams",
            )
        num_blocks = self.num_blocks
        if self.window is not None and not self.window.holds(num_beams, self.max_num_batched_tokens):
            num_blocks = min(num_blocks, self.window.num_blocks)  # while none gives one back, they suffice
        return replace(self, num_blocks=num_blocks // num_beams)

    def for_decoder(self, num_encoder: int) -> Limits:
        """What is left to the decoder of a sequence whose encoder reads ``num_encoder`` tokens."""
        return replace(self, num_blocks=self.num_blocks - -(-num_encoder // self.block_size))


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How much may wait; None: no bound."""

    num_requests: int | None  # each branch is one; beyond those the next step has room for
    num_tokens: int | None  # of prompts, once per branch

    def check(self, num_queued: int, num_waiting_tokens: int, branches: Sequence[Request]) -> None:
        """Refuse a request that finds too much before it. By tokens, none is refused where none wait.

        Raises:
            QueueFullError: names the bound.
        """
        bound = self.num_requests
        if bound is not None and num_queued >= bound:
            raise QueueFullError(f"{num_queued} requests wait already (max_num_queued_requests is {bound})")
        num_tokens, bound = sum(request.num_input for request in branches), self.num_tokens
        if bound is not None and num_waiting_tokens and num_waiting_tokens + num_tokens > bound:
            raise QueueFullError(
                f"{num_waiting_tokens} prompt tokens wait already, and the request has {num_tokens} "
                f"(max_num_queued_tokens is {bound})"
            )


def make_branches(spec: RequestSpec, first_sequence_id: int, limits: Limits) -> list[Request]:
    """One branch per sampling spec, with sequence ids in order.

    The first leads: the others wait for it to compute the full blocks of the prompt and share them, and
    what comes of its encoder's input. At least one prompt token is left to each; where there is nothing to
    share, all are independent.

    Raises:
        RequestError: the request could never be served; ``field`` names why.
    """
    assert spec.sampling, "a request has at least one branch"
    assert [sampling.branch for sampling in spec.sampling] == list(range(len(spec.sampling)))
    prompt = _pack_prompt(spec.prompt_ids)
    encoder_ids = _encoder_input(spec, limits)
    num_beams = 1 if spec.beams is None else spec.beams.num_beams
    if num_beams > 1:
        limits = limits.for_beams(num_beams)
    left = limits.for_decoder(len(encoder_ids))
    if left.num_blocks < 1 and num_beams > 1:
        raise RequestError(
            f"num_beams: each of {num_beams} beams has room for {limits.num_blocks} blocks of "
            f"{limits.block_size} in the KV cache, too few for a prompt and an encoder's input of "
            f"{len(encoder_ids)} tokens; search with fewer, or give the cache more memory "
            "(kv_cache_memory_bytes, gpu_memory_utilization, num_gpu_blocks_override)",
            field="num_beams",
        )
    max_tokens = _max_output(len(prompt), spec.max_tokens, left)
    # What a decoder computes depends on its encoder's input too.
    salt = _salted(spec.cache_salt, encoder_ids) if encoder_ids else spec.cache_salt
    num_shared = (len(prompt) - 1) // limits.block_size * limits.block_size if limits.shares_blocks else 0
    branches: list[Request] = []
    for index, sampling in enumerate(spec.sampling):
        token_ids = prompt[:]
        request = Request(
            sequence_id=first_sequence_id + index,
            request_id=spec.request_id,
            sampling=sampling,
            token_ids=token_ids,
            num_prompt=len(prompt),
            max_tokens=max_tokens,
            eos_ids=frozenset() if spec.ignore_eos else spec.eos_ids,
            stop_ids=spec.stop_ids,
            blocks=SequenceBlocks(token_ids, salt, num_encoder=len(encoder_ids)),
            leader=branches[0] if branches and (num_shared or encoder_ids) else None,
            num_shared=num_shared,
            encoder_ids=encoder_ids,
            forced_first_id=spec.forced_first_id,
            forced_last_id=spec.forced_last_id,
        )
        branches.append(request)
    if spec.beams is not None:
        _group(spec.beams, branches)
    return branches


def _group(spec: BeamSpec, branches: list[Request]) -> None:
    """Make branches beams: the first begins alone."""
    first = branches[0]
    group = BeamGroup(spec, branches, first.ending_ids, first.max_tokens)
    for request in branches:
        request.group = group
        request.leader = None
        request.is_parked = request is not first


def _encoder_input(spec: RequestSpec, limits: Limits) -> array[int]:
    """The encoder's ids; none where there is no encoder."""
    if not limits.max_encoder_len:
        assert not spec.encoder_ids, "there is no encoder"
        return array("i")
    encoder_ids = _pack_prompt(spec.encoder_ids)
    if len(encoder_ids) > limits.max_encoder_len:
        raise RequestError(
            f"prompt: has {len(encoder_ids)} tokens, and the encoder takes {limits.max_encoder_len}: as many "
            "as the model was made for and as fit into one step (max_num_batched_tokens less one), since an "
            "encoder's input is never split; shorten it",
            field="prompt",
        )
    room = limits.for_decoder(len(encoder_ids)).num_blocks
    if room < 1:
        raise RequestError(
            f"prompt: has {len(encoder_ids)} tokens, and the KV cache of {limits.num_blocks} blocks of "
            f"{limits.block_size} has no room for them and a decoder's; shorten it, or give the cache more "
            "memory (kv_cache_memory_bytes, gpu_memory_utilization, num_gpu_blocks_override)",
            field="prompt",
        )
    return encoder_ids


def _salted(salt: bytes, encoder_ids: array[int]) -> bytes:
    return blake2b(encoder_ids.tobytes(), key=salt[:64], digest_size=16).digest()


def _pack_prompt(prompt_ids: Sequence[int]) -> array[int]:
    """A prompt as an int32 array of our own."""
    try:
        packed = array("i", list(prompt_ids))
    except (TypeError, OverflowError) as error:
        raise RequestError(f"prompt: must be a list of token ids ({error})", field="prompt") from None
    if not packed:
        raise RequestError("prompt: is empty; give at least one token", field="prompt")
    if min(packed) < 0:
        raise RequestError(f"prompt: token ids are at least 0, got {min(packed)}", field="prompt")
    return packed


def _max_output(num_prompt: int, max_tokens: int | None, limits: Limits) -> int:
    """Output tokens of a branch: what was asked for, as far as it fits."""
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"max_tokens: must be at least 1, got {max_tokens}", field="max_tokens")
    if num_prompt + 1 > limits.max_model_len:
        raise RequestError(
            f"prompt: has {num_prompt} tokens, and with one output token that exceeds max_model_len "
            f"({limits.max_model_len}); shorten it",
            field="prompt",
        )
    capacity = limits.num_blocks * limits.block_size
    if num_prompt > capacity:
        raise RequestError(
            f"prompt: has {num_prompt} tokens, and the KV cache has room for {capacity} "
            f"({limits.num_blocks} blocks of {limits.block_size}); shorten it, or give the cache more "
            "memory (kv_cache_memory_bytes, gpu_memory_utilization, num_gpu_blocks_override)",
            field="prompt",
        )
    # The last output token is never computed, so it needs no slot.
    fitting = min(limits.max_model_len - num_prompt, capacity - num_prompt + 1)
    return fitting if max_tokens is None else min(max_tokens, fitting)
