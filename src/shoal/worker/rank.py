"""One rank: builds its part of the model, keeps its KV pages, runs the steps it is sent. Knows no request,
no scheduler, and no other rank but through its collectives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from shoal.attention.base import KVShape, PagedKernel
from shoal.attention.kernels import KernelMaker
from shoal.attention.pages import allocate
from shoal.attention.resolve import resolve as resolve_attention
from shoal.checkpoint.load import load_weights
from shoal.checkpoint.progress import Report
from shoal.checkpoint.reader import CheckpointReader
from shoal.comm.base import Comm, TimedComm
from shoal.comm.choose import join_group
from shoal.comm.local import LocalComm
from shoal.config import EngineConfig, make_config
from shoal.device.backing import Backing
from shoal.device.base import Device, resolve_device, resolve_dtype, threads_per_rank
from shoal.device.memory import process_private_bytes
from shoal.device.peak import reset_peak, trim_heap, used_since
from shoal.device.pinning import pin_thread, rank_cores
from shoal.errors import EngineError, UnsupportedError
from shoal.messages import (
    AllocateKV,
    Encode,
    Ping,
    RankReady,
    RankReport,
    Start,
    Step,
    StepResult,
)
from shoal.model.base import KeepsState, ServedModel
from shoal.model.build import build_empty, load_config, model_length, vocabulary_size
from shoal.model.choose import Chosen, Fuse, serve_causal
from shoal.model.choose_encoder import ChosenEncoder, FuseEncoder, serve_encoder
from shoal.model.choose_seq2seq import serve_seq2seq
from shoal.model.encoder import EncoderModel
from shoal.model.pooling import is_pooling, served_class
from shoal.model.replaced import Pack
from shoal.model.trial import Trials
from shoal.plan.slices import slices, zero_names
from shoal.plan.types import Plan
from shoal.shard.apply import shard
from shoal.worker.encode import EncodeRunner
from shoal.worker.faults import Faults
from shoal.worker.first_step import first_step
from shoal.worker.runner import Runner
from shoal.worker.sizing import kv_budget, step_cost

__all__ = ["RankWorker", "weight_bytes"]

_log = logging.getLogger("shoal.worker")
_SAMPLING_RANK = 0
_OUR_ATTENTION = ("served the paged way", "served the fused way", "served the packed way")

# Of the step's time: ranks that wait in vain say so before the executor gives up, so it knows for whom.
_COLLECTIVE_SHARE = 0.7


class _Deeper(NamedTuple):
    """What puts CPU kernels in the place of a decoder's or an encoder's layers, and of what is left of its
    modules; None where they are not wanted."""

    fuse: Fuse | None = None
    fuse_encoder: FuseEncoder | None = None
    pack: Pack | None = None


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the unique storages of parameters and buffers."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*module.parameters(), *module.buffers())
    }
    return sum(storages.values())


class RankWorker:
    """One rank's life: :meth:`start`, :meth:`allocate`, any number of :meth:`execute`, :meth:`close`.

    Args:
        comm: this rank's end of a group that exists already; None: join one as the start message says.
        may_pin: whether the process is the rank's own, so that its threads may be kept to some cores.
    """

    def __init__(self, comm: Comm | None = None, may_pin: bool = False) -> None:
        self._rank = 0
        self._device: Device | None = None
        self._dtype = torch.float32
        self._comm = comm
        self._model: ServedModel | None = None
        self._encoder: EncoderModel | None = None  # in its place, where nothing is generated
        self._runner: Runner | None = None
        self._encode_runner: EncodeRunner | None = None
        self._private_before = 0
        self._backing: Backing | None = None  # of KV pages, while they are given their memory
        self._step_timeout_s = 0.0
        self._faults = Faults([])
        self._torch_threads = 0  # to be given back; 0: none were taken
        self._may_pin = may_pin
        self._cores: list[int] | None = None  # that this rank keeps to, one a thread

    def start(self, start: Start, report: Report | None = None) -> RankReport:
        """Build and load this rank's part of the model, and measure it."""
        started = time.perf_counter()
        config = make_config(**start.config)
        self._rank = start.rank
        self._step_timeout_s = config.least_step_timeout_s
        self._faults = Faults.of_rank(start.rank)
        device = self._use_device(config, start)
        path = Path(start.model_path)
        hf_config = load_config(path, config.trust_remote_code)
        pools = is_pooling(hf_config, path, config.runner)
        model_class = served_class(hf_config, path, config.trust_remote_code, config.runner)
        dtype = resolve_dtype(config.dtype, device, hf_config.dtype)
        self._dtype = getattr(torch, dtype.name)
        comm = self._comm = self._comm or self._join(config, start, device)
        module = build_empty(model_class, hf_config, self._dtype)
        plan = Plan.from_dict(start.plan)
        parts, zeros = slices(plan, module, start.rank), zero_names(plan, module, start.rank)
        trials = Trials(shard(module, plan, start.rank, comm), device.torch_device)
        kernel_name, kernel = self._choose_kernel(config, device)  # a compiler's memory is no weight's
        deeper = self._deeper(kernel, config, trials)
        trim_heap()
        self._private_before, peak_before = process_private_bytes(), reset_peak("cpu")
        with CheckpointReader(path) as reader:
            loaded = load_weights(module, reader, parts, device.torch_device, self._dtype, report, zeros)
        load_peak = used_since("cpu", peak_before)
        serve = self._serve_encoder if pools else self._serve
        chosen = serve(module, kernel, deeper, config, trials)
        if config.quantization is not None and not chosen.packed_bytes:
            raise UnsupportedError(
                f"quantization: nothing can be held in {config.quantization}: {'; '.join(chosen.notes)}",
                field="quantization",
            )
        length = min(config.max_model_len or 1 << 30, model_length(hf_config) or 1 << 30)
        budget, step_s = self._budget(config, device, start.world_size, vocabulary_size(hf_config), length)
        return RankReport(
            rank=start.rank,
            weight_bytes=weight_bytes(module) + chosen.packed_bytes,
            bytes_read=loaded.bytes_read,
            load_s=time.perf_counter() - started,
            kv_bytes_per_token=sum(s.bytes_per_token(self._dtype.itemsize) for s in self._kv_shapes),
            kv_budget_bytes=budget,
            step_s=step_s,
            private_growth_bytes=process_private_bytes() - self._private_before,
            peak_growth_bytes=load_peak,
            attention=kernel_name if chosen.notes[-1] in _OUR_ATTENTION else "the model's own",
            dtype=dtype.name,
            way="encoder" if self._model is None else self._model.way,
            state_bytes=self._model.state_bytes if isinstance(self._model, KeepsState) else 0,
            window=max((s.window or 0 for s in self._kv_shapes), default=0),
            window_bytes_per_token=sum(
                s.bytes_per_token(self._dtype.itemsize) for s in self._kv_shapes if s.window
            ),
            makes_vectors=self._encoder is None or self._encoder.makes_vectors,
            notes=(dtype.reason, *chosen.notes),
        )

    def allocate(self, message: AllocateKV) -> RankReady:
        """Make the KV pages, of an encoder none, and run a first step over them."""
        self._step_timeout_s = message.step_timeout_s or self._step_timeout_s
        if self._encoder is not None:
            return self._open_encoder(self._encoder)
        model, device = self._model_(), self._device_()
        is_put_off = device.kind == "cpu" and Backing.is_possible()
        backing = self._backing = Backing() if is_put_off else None
        pages = allocate(
            model.kv_shapes,
            message.num_blocks,
            message.block_size,
            self._dtype,
            device.torch_device,
            message.num_window_blocks,
            backing,
        )
        model.use_pages(pages)
        if isinstance(model, KeepsState):
            model.use_slots(message.num_slots)
        comm = self._comm
        assert comm is not None
        self._runner = Runner(model, message.block_size, device.torch_device, comm, _SAMPLING_RANK)
        self._runner.execute(first_step(message, model.way == "seq2seq"))
        self._set_timeout()
        trim_heap()
        kv_bytes = sum(p.keys.nbytes + p.values.nbytes for p in pages)
        if isinstance(model, KeepsState):
            kv_bytes += model.state_bytes * message.num_slots
        growth = process_private_bytes() - self._private_before
        if device.kind == "cpu":
            growth -= kv_bytes
        if backing is not None:
            growth += backing.num_bytes
            backing.start()
        return RankReady(rank=self._rank, kv_bytes=kv_bytes, private_growth_bytes=growth)

    def ping(self, ping: Ping) -> Ping:
        """Give a sign of life."""
        self._faults.before(ping)
        return ping

    def execute(self, step: Step | Encode) -> StepResult:
        """Run one step."""
        if isinstance(step, Step):
            self._faults.before(step)
        if isinstance(step, Encode) and self._encode_runner is not None:
            return self._encode_runner.execute(step)
        if self._runner is None or isinstance(step, Encode):
            raise EngineError("a rank was sent a step before its KV pages, or one that is not for its model")
        return self._runner.execute(step)

    def close(self) -> None:
        """Release the model, the pages and the group."""
        self._model = self._encoder = None
        if self._backing is not None:
            self._backing.stop()
            self._backing = None
        self._runner = self._encode_runner = None
        if self._torch_threads:
            torch.set_num_threads(self._torch_threads)
            self._torch_threads = 0
        if self._comm is not None:
            self._comm.close()
            self._comm = None

    def _use_device(self, config: EngineConfig, start: Start) -> Device:
        self._device = resolve_device(config.device).for_rank(start.rank)
        self._device.activate()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        elif start.world_size > 1 and self._device.kind == "cpu":
            torch.set_num_threads(threads_per_rank(start.world_size))
        if self._may_pin and config.cpu_pinning == "auto" and self._device.kind == "cpu":
            threads = torch.get_num_threads()
            self._cores = rank_cores(start.rank, start.world_size, threads, config.replica_index)
        if self._cores is not None:
            pin_thread(self._cores)  # before any library starts threads: they share these cores
        return self._device

    def _join(self, config: EngineConfig, start: Start, device: Device) -> Comm:
        if start.world_size == 1:
            return LocalComm()
        # Until steps come, the others may read their weights from a slower disk: no step's deadline counts.
        return join_group(
            start.rank,
            start.world_size,
            start.rendezvous,
            device.torch_device,
            config.load_timeout,
            config.comm,
            start.generation,
        )

    def _choose_kernel(self, config: EngineConfig, device: Device) -> tuple[str, PagedKernel]:
        maker = KernelMaker(self._dtype, num_threads=torch.get_num_threads(), cores=self._cores)
        name = resolve_attention(config.attn_implementation, device, maker.problem).name
        return name, maker.make(name)

    def _take_torch_threads(self) -> None:
        """Torch's threads would spin between its few small operations, on the cores of ours."""
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def _open_encoder(self, encoder: EncoderModel) -> RankReady:
        self._encode_runner = EncodeRunner(
            encoder, self._device_().torch_device, answers=self._rank == _SAMPLING_RANK
        )
        self._encode_runner.warm_up()
        self._set_timeout()
        trim_heap()
        growth = process_private_bytes() - self._private_before
        return RankReady(rank=self._rank, kv_bytes=0, private_growth_bytes=growth)

    def _set_timeout(self) -> None:
        if isinstance(self._comm, TimedComm):  # the others of the Protocol wait for nobody, or for threads
            self._comm.set_timeout(self._step_timeout_s * _COLLECTIVE_SHARE)

    def _serve_encoder(
        self,
        module: PreTrainedModel,
        kernel: PagedKernel,
        deeper: _Deeper,
        config: EngineConfig,
        trials: Trials,
    ) -> ChosenEncoder:
        further = (deeper.fuse_encoder, deeper.pack, config.way, trials)
        chosen = serve_encoder(module, kernel, self._device_().torch_device, *further)
        self._encoder = chosen.model
        if chosen.computes_alone:
            self._take_torch_threads()
        return chosen

    @torch.inference_mode()
    def _serve(
        self,
        module: PreTrainedModel,
        kernel: PagedKernel,
        deeper: _Deeper,
        config: EngineConfig,
        trials: Trials,
    ) -> Chosen:
        device = self._device_().torch_device
        if module.config.is_encoder_decoder:
            chosen = serve_seq2seq(module, device, deeper.pack, trials)
        else:
            further = (deeper.fuse, deeper.pack, config.compile, config.way, trials)
            chosen = serve_causal(module, kernel, device, *further)
        self._model = chosen.model
        if getattr(chosen.model, "computes_alone", False):
            self._take_torch_threads()
            if self._cores is not None:
                pin_thread(self._cores[:1])  # the others are the team's
        return chosen

    def _deeper(self, kernel: PagedKernel, config: EngineConfig, trials: Trials) -> _Deeper:
        """What puts CPU kernels in the place of the model's layers, and of what is left of its modules, if
        they are wanted and can be had.

        Raises:
            UnsupportedError: they cannot, and quantised weights are for them alone.
        """
        is_wanted = config.cpu_kernels != "off" and self._device_().kind == "cpu"
        if trials.agree(is_wanted and hasattr(kernel, "team"), "no CPU kernels") is not None:
            if config.quantization is not None:
                raise UnsupportedError(
                    f"quantization: {config.quantization} weights are for our CPU kernels: it takes a CPU, "
                    "float32 or bfloat16, the cpu_paged attention kernel, and cpu_kernels not off",
                    field="quantization",
                )
            return _Deeper()
        from shoal.attention.cpu import CpuPaged
        from shoal.fuse.compiled import compile_jobs
        from shoal.fuse.modules import pack_modules
        from shoal.fuse.rival import race
        from shoal.model.fused import FusedCausal
        from shoal.model.fused_encoder import FusedEncoder

        comm, storage = self._comm, "bfloat16" if self._dtype is torch.bfloat16 else "float32"
        storage = config.quantization or storage
        assert comm is not None and isinstance(kernel, CpuPaged)
        compile_jobs(storage, comm)
        if config.quantization is None and not (found := race(self._dtype, comm)).is_won:
            _log.warning("cpu_kernels: torch computes, which is faster on this processor (%s)", found)
            return _Deeper()
        return _Deeper(
            fuse=lambda module, paged: FusedCausal(module, paged, kernel, comm, storage),
            fuse_encoder=lambda module, packed: FusedEncoder(module, packed, kernel, comm, storage),
            pack=lambda module, run: pack_modules(module, run, kernel.team, comm, storage),
        )

    def _budget(
        self, config: EngineConfig, device: Device, world_size: int, vocabulary: int, max_model_len: int
    ) -> tuple[int, float]:
        """Bytes for KV pages, and the seconds of the largest step if they were measured for that."""
        if self._encoder is not None:
            return 0, 0.0
        if config.kv_cache_memory_bytes is not None or config.num_gpu_blocks_override is not None:
            return config.kv_cache_memory_bytes or 0, 0.0
        cost = step_cost(self._model_(), config, device, vocabulary, max_model_len)
        on_device = world_size if device.kind == "cpu" else 1
        return kv_budget(config, device, on_device, cost.growth_bytes), cost.seconds

    @property
    def _kv_shapes(self) -> Sequence[KVShape]:
        return () if self._encoder is not None else self._model_().kv_shapes

    def _model_(self) -> ServedModel:
        assert self._model is not None, "start comes first"
        return self._model

    def _device_(self) -> Device:
        assert self._device is not None, "start comes first"
        return self._device
