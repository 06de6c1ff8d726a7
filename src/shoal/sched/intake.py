"""From what a caller wants to branches that can be served, or a refusal. Knows no queue and no state."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cache.manager import SequenceBlocks
from shoal.errors import RequestError
from shoal.sched.request import Request, RequestSpec

__all__ = ["Limits", "make_branches"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one sequence."""

    max_model_len: int  # tokens, prompt and output
    num_blocks: int
    block_size: int  # tokens per block


def make_branches(spec: RequestSpec, first_sequence_id: int, limits: Limits) -> list[Request]:
    """One branch per sampling spec, with sequence ids in order.

    The first leads: the others wait for it to compute the full blocks of the prompt and share them.
    At least one prompt token is left to each, and a prompt too short to share makes all independent.

    Raises:
        RequestError: the request could never be served; ``field`` names why.
    """
    assert spec.sampling, "a request has at least one branch"
    assert [sampling.branch for sampling in spec.sampling] == list(range(len(spec.sampling)))
    prompt = _pack_prompt(spec.prompt_ids)
    max_tokens = _max_output(len(prompt), spec.max_tokens, limits)
    num_shared = (len(prompt) - 1) // limits.block_size * limits.block_size
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
            blocks=SequenceBlocks(token_ids, spec.cache_salt),
            leader=branches[0] if branches and num_shared else None,
            num_shared=num_shared,
        )
        branches.append(request)
    return branches


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
