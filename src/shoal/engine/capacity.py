"""How much an engine keeps and computes at once, by its options and what ranks measured. Knows no request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.cache.spec import WindowSpec
from shoal.config import EngineConfig
from shoal.errors import ConfigError
from shoal.messages import RankReport

__all__ = ["Capacity", "capacity_of"]

_log = logging.getLogger("shoal.engine")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What every rank keeps, and what fits."""

    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int = 0  # of KV; where nothing is kept, they only bound how much runs at once
    num_slots: int = 0  # of states; 0: the model keeps none
    keeps_kv: bool = True  # False: every step computes whole sequences
    window: WindowSpec | None = None  # of layers that see one, and keep no more; None: all keep all

    @property
    def num_window_blocks(self) -> int:
        """Blocks of these layers; 0 where there are none."""
        return 0 if self.window is None else self.window.num_blocks


def capacity_of(config: EngineConfig, reports: Sequence[RankReport], length: int) -> Capacity:
    """Blocks and states that every rank can keep, and what then fits.

    Args:
        reports: of all ranks, which are served alike.
        length: the longest sequence, as far as the model goes.

    Raises:
        ConfigError: there is no room for a single block, or a single state.
    """
    slots = _num_slots(config, reports)
    blocks, window = _num_blocks(config, reports, length, slots)
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
    return Capacity(length, budget, blocks, slots, keeps_kv, window)


def _num_blocks(
    config: EngineConfig, reports: Sequence[RankReport], length: int, num_slots: int
) -> tuple[int, WindowSpec | None]:
    """KV blocks that every rank can keep beside states, at most what ``max_num_seqs`` full sequences need;
    and those of layers that see a window, where that is shorter than a sequence.

    Raises:
        ConfigError: not one.
    """
    size = config.block_size
    sides = 2 if reports[0].way == "seq2seq" else 1  # what an encoder reads is kept beside a decoder's tokens
    longest = -(-length // size)
    enough = config.max_num_seqs * longest * sides
    window = max(report.window for report in reports)
    spec = WindowSpec(window=window, block_size=size, num_blocks=1) if 0 < window < length else None
    demand = _Demand.of(config, spec, longest, enough)
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
        return blocks, None if spec is None else replace(spec, num_blocks=min(blocks, demand.windows))
    # A rank without a KV head of its own keeps nothing, and bounds nothing.
    keeping = [r for r in reports if r.kv_bytes_per_token]
    fits = [_fitting(report, demand, size, num_slots) for report in keeping] or [(enough, demand.windows)]
    blocks, windows = (min(column) for column in zip(*fits, strict=True))
    if blocks < 1:
        poorest = keeping[min(range(len(keeping)), key=lambda index: fits[index])]
        raise ConfigError(
            f"kv_cache_memory_bytes: rank {poorest.rank} has {poorest.kv_budget_bytes} bytes for KV pages, a "
            f"block takes {poorest.kv_bytes_per_token * size}; raise gpu_memory_utilization or "
            "kv_cache_memory_bytes, or use more ranks",
            field="kv_cache_memory_bytes",
        )
    if spec is None:
        return min(blocks, enough), None
    if windows < demand.least:
        blocks = min(blocks, windows)  # so few that they are all that a sequence may have
    return min(blocks, enough), replace(spec, num_blocks=windows)


@dataclass(frozen=True, slots=True)
class _Demand:
    """Blocks that an engine has use for."""

    longest: int  # of the longest sequence
    enough: int  # of all sequences
    least: int = 0  # of windows: one sequence alone
    windows: int = 0  # of windows: all sequences, and as many prefixes to be reused
    behind: int = 1  # that a window takes at least, once a sequence is longer

    @classmethod
    def of(cls, config: EngineConfig, spec: WindowSpec | None, longest: int, enough: int) -> _Demand:
        if spec is None:
            return cls(longest, enough)
        tokens = config.max_num_batched_tokens
        prefixes = config.max_num_seqs if config.enable_prefix_caching else 0  # that nobody goes on from now
        return cls(
            longest,
            enough,
            min(longest, spec.wanted(1, tokens)),
            min(enough, spec.wanted(config.max_num_seqs + prefixes, tokens)),
            max(1, spec.num_behind),
        )


def _fitting(report: RankReport, demand: _Demand, block_size: int, num_slots: int) -> tuple[int, int]:
    """Blocks that a rank has memory for: of layers that keep all, and of those that see a window.

    Windows get what there is use for, but at most half of the memory and no more blocks than the others;
    and less, down to what one sequence needs, if the longest sequence would not fit otherwise.
    """
    left = report.kv_budget_bytes - num_slots * report.state_bytes
    block_bytes = report.kv_bytes_per_token * block_size
    window_bytes = report.window_bytes_per_token * block_size
    full_bytes = block_bytes - window_bytes
    equal = left // block_bytes
    if not demand.windows or not window_bytes:
        return equal, demand.windows
    if equal <= demand.least:
        return equal, equal
    if not full_bytes:
        windows = min(demand.windows, equal)
        # Blocks that only number positions take no memory: as many as can come to be held.
        return windows * -(-demand.longest // demand.behind), windows
    windows = min(demand.windows, left // max(2 * window_bytes, block_bytes))
    for_longest = (left - demand.longest * full_bytes) // window_bytes
    windows = max(demand.least, min(windows, for_longest))
    return (left - windows * window_bytes) // full_bytes, windows


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
