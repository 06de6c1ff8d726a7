"""How many bytes of a device go to KV pages. Measures the worst step on the loaded model; knows no block.

The rule: what may be used, less what is used, less the growth of a worst-case step. On a CPU, ranks of one
engine share the machine's memory, and without an explicit share the pages stay modest, so that other
programs (and other engines) live.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from shoal.config import EngineConfig
from shoal.device.base import Device
from shoal.device.memory import process_private_bytes
from shoal.device.peak import reset_peak, trim_heap, used_since
from shoal.model.base import ServedModel

__all__ = ["StepCost", "kv_budget", "step_cost"]

_CPU_DEFAULT_BYTES = 4 << 30  # KV pages of all ranks together, where no share was asked for
_CPU_DEFAULT_SHARE = 0.25  # and of the memory that is free at most this share
_ACCELERATOR_SHARE = 0.9  # vLLM's default
_PROBE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StepCost:
    """What the largest step takes, about."""

    growth_bytes: int  # for a while
    seconds: float


@torch.inference_mode()
def step_cost(
    model: ServedModel, config: EngineConfig, device: Device, vocabulary: int, max_model_len: int
) -> StepCost:
    """The cost of a step of ``max_num_batched_tokens`` tokens and ``max_num_seqs`` logits rows.

    Measured on a step of at most 256 tokens and scaled up: what a forward pass holds grows at most in
    proportion to its tokens, since attention never spans sequences. The logits rows are not measured but
    counted: five rows of the vocabulary in float32 for the sampler and its copies.
    """
    tokens = min(config.max_num_batched_tokens, max_model_len, _PROBE_TOKENS)
    ids = torch.arange(tokens, device=device.torch_device) % vocabulary
    last = torch.tensor([tokens - 1], device=device.torch_device)
    before, started = reset_peak(device.kind), time.perf_counter()
    model.plain(ids, last)
    device.synchronize()
    seconds, growth = time.perf_counter() - started, used_since(device.kind, before)
    trim_heap()
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    times = -(-config.max_num_batched_tokens // tokens)
    return StepCost(growth * times + 5 * 4 * rows * vocabulary, seconds * times)


def kv_budget(config: EngineConfig, device: Device, ranks_on_device: int, growth_bytes: int) -> int:
    """Bytes this rank can give to KV pages; 0 if there is no room.

    Args:
        ranks_on_device: ranks that share this device's memory (all of them on a CPU).
        growth_bytes: of a worst-case step, on this rank.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    memory = device.memory()
    share = config.gpu_memory_utilization
    free = memory.free // ranks_on_device - growth_bytes
    if device.kind == "cpu" and share is None:
        return max(0, min(_CPU_DEFAULT_BYTES // ranks_on_device, int(free * _CPU_DEFAULT_SHARE)))
    allowed = int(memory.total * (share or _ACCELERATOR_SHARE)) // ranks_on_device
    used = process_private_bytes() if device.kind == "cpu" else memory.total - memory.free
    return max(0, min(free, allowed - used - growth_bytes))
