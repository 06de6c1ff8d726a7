"""How much an engine keeps and computes at once, by its options and what ranks measured. Knows no request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config import EngineConfig
from shoal.errors import ConfigError
from shoal.messages import RankReport

__all__ = ["Capacity", "capacity_of", "num_blocks"]

_log = logging.getLogger("shoal.engine")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What every rank keeps, and what fits."""

    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int = 0  # of KV; where nothing is kept, they only bound how much runs at once
    num_slots: int = 0  # of states; 0: the model keeps none
    keeps_kv: bool = True  # False: every step computes whole sequences


def capacity_of(config: EngineConfig, reports: Sequence[RankReport], length: int) -> Capacity:
    """Blocks and states that every rank can keep, and what then fits.

    Args:
        reports: of all ranks, which are served alike.
        length: the longest sequence, as far as the model goes.

    Raises:
        ConfigError: there is no room for a single block, or a single state.
    """
    slots = _num_slots(config, reports)
    blocks = num_blocks(config, reports, length, slots)
    length = _fitting_len(config, length, blocks)
    keeps_kv, budget = reports[0].way != "recompute", config.max_num_batched_tokens
    if not keeps_kv and budget < length:
        _log.warning(
            "max_num_batched_tokens is %d, not %d: a step computes whole sequences of up to so many tokens "
            "(lower max_model_len to lower it)",
            length,
            budget,
        )
        budget = length
    return Capacity(length, budget, blocks, slots, keeps_kv)


def num_blocks(config: EngineConfig, reports: Sequence[RankReport], length: int, num_slots: int = 0) -> int:
    """KV blocks that every rank can keep beside states; at most what ``max_num_seqs`` full sequences need.

    Raises:
        ConfigError: not one.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    sides = 2 if reports[0].way == "seq2seq" else 1  # what an encoder reads is kept beside a decoder's tokens
    enough = config.max_num_seqs * -(-length // config.block_size) * sides
    # A rank without a KV head of its own keeps nothing, and bounds nothing.
    keeping = [r for r in reports if r.kv_bytes_per_token]
    if not keeping:
        return enough

    def fitting(report: RankReport) -> int:
        left = report.kv_budget_bytes - num_slots * report.state_bytes
        return left // (report.kv_bytes_per_token * config.block_size)

    poorest = min(keeping, key=fitting)
    if fitting(poorest) < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes: rank {poorest.rank} has {poorest.kv_budget_bytes} bytes for KV pages, a "
            f"block takes {poorest.kv_bytes_per_token * config.block_size}; raise gpu_memory_utilization or "
            "kv_cache_memory_bytes, or use more ranks",
            field="kv_cache_memory_bytes",
        )
    return min(fitting(poorest), enough)


def _num_slots(config: EngineConfig, reports: Sequence[RankReport]) -> int:
    """States that every rank can keep, at most ``max_num_seqs``; 0 where the model keeps none.

    Beside keys and values they get half the memory: which of the two runs out depends on the prompts.
    """
    if reports[0].way != "state":
        return 0
    keeping = [r for r in reports if r.state_bytes]
    if config.num_gpu_blocks_override is not None or not keeping:
        return config.max_num_seqs

    def share(report: RankReport) -> int:
        return report.kv_budget_bytes // (2 if report.kv_bytes_per_token else 1)

    def fitting(report: RankReport) -> int:
        return share(report) // report.state_bytes

    poorest = min(keeping, key=fitting)
    if fitting(poorest) < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes: rank {poorest.rank} has {share(poorest)} bytes for states, too few for "
            f"the {poorest.state_bytes} that one sequence's state takes; raise gpu_memory_utilization or "
            "kv_cache_memory_bytes, or use more ranks",
            field="kv_cache_memory_bytes",
        )
    if fitting(poorest) < config.max_num_seqs:
        _log.warning(
            "max_num_seqs is %d, not %d: so many states fit into memory",
            fitting(poorest),
            config.max_num_seqs,
        )
    return min(fitting(poorest), config.max_num_seqs)


def _fitting_len(config: EngineConfig, length: int, blocks: int) -> int:
    fitting = blocks * config.block_size
    if length > fitting:
        _log.warning(
            "max_model_len is %d, not %d: so many tokens fit into the KV cache of %d blocks",
            fitting,
            length,
            blocks,
        )
    return min(length, fitting)
