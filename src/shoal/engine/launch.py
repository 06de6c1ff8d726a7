"""From a configuration to a running engine core: find the model, plan, prove, load, size. Each decision made
for the user is said in one log line. Knows no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from shoal.cache.manager import CacheManager
from shoal.checkpoint.progress import reporting
from shoal.checkpoint.source import check_supported, resolve
from shoal.config import EngineConfig
from shoal.device.base import Device, check_ranks, resolve_device, threads_per_rank
from shoal.device.cpu import usable_cores
from shoal.engine.admission import Admission
from shoal.engine.capacity import Capacity, capacity_of
from shoal.engine.core import EngineCore
from shoal.engine.decoding import Decoding, read_decoding
from shoal.engine.encode_core import EncodeCore
from shoal.engine.encode_launch import encode_core, encoder_tasks
from shoal.engine.generation_defaults import eos_token_ids, model_sampling_defaults
from shoal.engine.protocol import EngineInfo
from shoal.engine.supervisor import RestartPolicy
from shoal.engine.text import Tokenizer
from shoal.errors import ConfigError, UnsupportedError
from shoal.home import home
from shoal.messages import AllocateKV, RankReady, RankReport
from shoal.model.build import load_config, model_length, steady_length, vocabulary_size, windows
from shoal.model.pooling import is_pooling, served_class
from shoal.model.ways import check_way
from shoal.plan.types import Plan
from shoal.prove.prove import plan_and_prove
from shoal.sched.scheduler import Scheduler
from shoal.worker.executor import Executor, InlineExecutor, ProcessExecutor
from shoal.worker.load import Load
from shoal.worker.torchrun import TorchrunExecutor, torchrun_place

__all__ = ["launch"]

_log = logging.getLogger("shoal.engine")

_STEPS_IN_TIMEOUT = 5  # largest steps, as estimated, that fit into the step timeout
_UNKNOWN_LENGTH = 2048  # vLLM's choice, too, where a config is silent (ALiBi has no table to run out of)


def launch(config: EngineConfig, show_progress: bool = False) -> EngineCore | EncodeCore:
    """Start an engine; what generates nothing is run by an :class:`EncodeCore`.

    Args:
        config: validated options.
        show_progress: bars (on a terminal) or lines about the slow parts, to stderr.

    Raises:
        UsageError: the model or an option is wrong; nothing is left running.
        RankError: a rank failed while loading.
    """
    started = time.perf_counter()
    device = resolve_device(config.device)
    check_ranks(device, config.tensor_parallel_size)
    path = resolve(config.model, config.revision, progress=show_progress)
    hf_config = load_config(path, config.trust_remote_code)
    check_supported(hf_config)
    model_class = served_class(hf_config, path, config.trust_remote_code, config.runner)
    pools = is_pooling(hf_config, path, config.runner)
    check_way(config.way, config.compile, hf_config, pools)
    tokenizer = Tokenizer.load(path, config.trust_remote_code, vocab_size=vocabulary_size(hf_config))
    tasks = None
    if pools:
        tasks = encoder_tasks(config, path, hf_config, model_class, tokenizer)
        length = tasks.make.max_length
    else:
        length = _model_len(config, hf_config)
        admission = _admission(config, path, hf_config, tokenizer, length)
    with reporting("planning and proving the split", show_progress and config.tensor_parallel_size > 1):
        plan = plan_and_prove(
            model_class, hf_config, config.tensor_parallel_size, home() / "plans", config.policy
        )
    executor = _executor(config, path, plan)
    try:
        with reporting("loading weights", show_progress) as report:
            reports = executor.load(report)
        fits = (
            capacity_of(config, reports, length)
            if tasks is None
            else Capacity(length, config.max_num_batched_tokens)
        )
        ready = executor.allocate(_pages(config, fits, reports))
        info = _info(config, model_class, device, plan, reports, ready, fits, started)
        _announce(info, reports, hf_config)
        ahead = 2 if _runs_ahead(config, device, executor) else 1
        restarts = RestartPolicy(config.max_restarts, config.restart_window)
        if tasks is not None:
            tasks.makes_vectors = reports[0].makes_vectors
            return encode_core(config, executor, tokenizer, info, restarts, tasks)
        scheduler = _scheduler(config, fits, admission.decoding)
        return EngineCore(executor, scheduler, tokenizer, admission, info, ahead, restarts)
    except BaseException:
        executor.shutdown()
        raise


def _pages(config: EngineConfig, fits: Capacity, reports: Sequence[RankReport]) -> AllocateKV:
    return AllocateKV(
        num_blocks=fits.num_blocks,
        block_size=config.block_size,
        num_window_blocks=fits.num_window_blocks,
        num_slots=fits.num_slots,
        step_timeout_s=_step_timeout_s(config, reports),
    )


def _step_timeout_s(config: EngineConfig, reports: Sequence[RankReport]) -> float:
    """After how long a step's ranks count as hung: where steps are slow, later than elsewhere."""
    least = config.least_step_timeout_s
    slowest = max(report.step_s for report in reports) * _STEPS_IN_TIMEOUT
    if config.step_timeout is not None or slowest <= least:
        return least
    _log.info(
        "step_timeout is %.0f s: the largest step may take some %.0f s", slowest, slowest / _STEPS_IN_TIMEOUT
    )
    return slowest


def _scheduler(config: EngineConfig, fits: Capacity, decoding: Decoding | None) -> Scheduler:
    cache = CacheManager(
        fits.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching and fits.keeps_kv and not fits.num_slots,
        num_slots=fits.num_slots or None,
        window=fits.window,
    )
    return Scheduler(
        cache,
        max_num_seqs=min(config.max_num_seqs, fits.num_slots or config.max_num_seqs),
        max_num_batched_tokens=fits.max_num_batched_tokens,
        max_model_len=fits.max_model_len,
        keeps_kv=fits.keeps_kv,
        max_num_queued_requests=config.max_num_queued_requests,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_encoder_len=decoding.max_encoder_len if decoding is not None else 0,
    )


def _model_len(config: EngineConfig, hf_config: PreTrainedConfig) -> int:
    """Tokens of one sequence, as far as the model goes."""
    own = model_length(hf_config.get_text_config())
    asked = config.max_model_len
    steady = steady_length(hf_config.get_text_config())
    if steady is not None and (asked or own or 0) > steady:
        if asked is not None:
            raise UnsupportedError(
                f"max_model_len: this model's longrope changes every position's embedding beyond {steady} "
                f"tokens, which is not built; pass at most {steady}",
                field="max_model_len",
            )
        _log.warning("max_model_len is %d, not %s: beyond it longrope is not built", steady, own)
        return steady
    if own is None and asked is None:
        _log.info("max_model_len is %d: the model's config does not say how long it may be", _UNKNOWN_LENGTH)
        return _UNKNOWN_LENGTH
    if own is not None and asked is not None and asked > own:
        raise ConfigError(
            f"max_model_len: {asked} is more than the model was made for ({own})", field="max_model_len"
        )
    return asked if asked is not None else own or 0


def _executor(config: EngineConfig, path: Path, plan: Plan) -> Executor:
    load = Load(
        config=config.model_dump(),
        model_path=str(path),
        plan=plan.to_dict(),
        world_size=config.tensor_parallel_size,
        load_timeout_s=config.load_timeout,
        step_timeout_s=config.least_step_timeout_s,
    )
    size = config.tensor_parallel_size
    place = torchrun_place()
    if place is not None and size > 1:
        if place[1] != size:
            raise ConfigError(
                f"tensor_parallel_size: {size}, but torchrun started {place[1]} ranks; make them equal",
                field="tensor_parallel_size",
            )
        return TorchrunExecutor(load)
    if config.executor == "inline" and size > 1:
        raise ConfigError("executor: inline carries one rank; pass processes", field="executor")
    if config.executor == "inline" or (config.executor == "auto" and size == 1):
        return InlineExecutor(load)
    return ProcessExecutor(load)


def _runs_ahead(config: EngineConfig, device: Device, executor: Executor) -> bool:
    """Whether a step is handed out while the last one is computed. That takes a core beside the ranks'."""
    asked = config.async_scheduling
    if not executor.computes_apart:
        if asked:
            _log.info("async_scheduling is off: the rank computes on the engine's own thread")
        return False
    if asked is not None:
        return asked
    threads = config.num_threads or threads_per_rank(config.tensor_parallel_size)
    return device.kind != "cpu" or config.tensor_parallel_size * threads < usable_cores()


def _admission(
    config: EngineConfig, path: Path, hf_config: PreTrainedConfig, tokenizer: Tokenizer, length: int
) -> Admission:
    return Admission(
        vocab_size=tokenizer.vocab_size,
        eos_ids=frozenset(eos_token_ids(path, hf_config, tokenizer)),
        model_defaults=model_sampling_defaults(path),
        seed=config.seed,
        replica_index=config.replica_index,
        decoding=(
            read_decoding(path, hf_config, length, config.max_model_len)
            if hf_config.is_encoder_decoder
            else None
        ),
    )


def _info(
    config: EngineConfig,
    model_class: type[PreTrainedModel],
    device: Device,
    plan: Plan,
    reports: Sequence[RankReport],
    ready: Sequence[RankReady],
    fits: Capacity,
    started: float,
) -> EngineInfo:
    ranks = tuple(
        {
            "rank": report.rank,
            "weight_bytes": report.weight_bytes,
            "kv_bytes": answer.kv_bytes,
            "kv_bytes_per_token": report.kv_bytes_per_token,
            "bytes_read": report.bytes_read,
            "private_growth_bytes": answer.private_growth_bytes,
            "peak_growth_bytes": report.peak_growth_bytes,
        }
        for report, answer in zip(reports, ready, strict=True)
    )
    summary = tuple(
        (pattern, split.op, "/".join(map(str, split.sizes)) if split.is_split else split.reason)
        for pattern, split in plan.params.items()
    )
    return EngineInfo(
        model=config.model,
        architecture=model_class.__name__,
        max_model_len=fits.max_model_len,
        tensor_parallel_size=config.tensor_parallel_size,
        num_blocks=fits.num_blocks,
        block_size=config.block_size,
        num_slots=fits.num_slots,
        num_window_blocks=fits.num_window_blocks,
        window=fits.window.window if fits.window is not None else 0,
        way=reports[0].way,
        attention=reports[0].attention,
        dtype=reports[0].dtype,
        device=device.name,
        plan_summary=summary,
        ranks=ranks,
        load_s=time.perf_counter() - started,
        notes=reports[0].notes,
    )


def _announce(info: EngineInfo, reports: Sequence[RankReport], hf_config: PreTrainedConfig) -> None:
    for note in reports[0].notes:
        _log.info("%s", note)
    _log.info("attention: %s on %s", info.attention, info.device)
    for rank in info.ranks:
        _log.info(
            "rank %d: %.1f MB of weights, %.1f MB of KV pages",
            rank["rank"],
            rank["weight_bytes"] / 1e6,
            rank["kv_bytes"] / 1e6,
        )
    if info.num_window_blocks:
        _log.info(
            "layers that see %d positions keep no more, in %d blocks of their own",
            info.window,
            info.num_window_blocks,
        )
    elif info.way in ("padded", "state") and windows(hf_config.get_text_config()):
        _log.info("layers that see a window keep all positions: so does every layer on the %s way", info.way)
    _log.info(
        "%s ready in %.1f s: %d blocks of %d tokens, sequences of up to %d",
        info.architecture,
        info.load_s,
        info.num_blocks,
        info.block_size,
        info.max_model_len,
    )
