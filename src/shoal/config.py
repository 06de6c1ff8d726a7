"""One frozen, validated description of an engine. Knows no device and no model: what depends on
them (dtype ``auto``, block counts, ranks that fit) is resolved by those who measure it.

Field names are vLLM's where it has one. An unknown field is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.errors import ConfigError

__all__ = ["EngineConfig", "make_config"]


_STEP_TIMEOUT_S = 30.0


class EngineConfig(BaseModel):
    """Everything that decides how an engine computes. Build it with :func:`make_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, protected_namespaces=())

    model: str = Field(min_length=1)  # hub id, folder, .gguf file, or "demo"
    revision: str | None = None  # of a hub model
    trust_remote_code: bool = False

    tensor_parallel_size: int = Field(default=1, ge=1)
    policy: str | dict[str, Any] | None = None  # how to split it, or a file that says; None: as measured
    runner: Literal["auto", "generate", "pooling"] = "auto"  # pooling: vectors and scores, no text
    executor: Literal["auto", "inline", "processes"] = "auto"
    replica_index: int = Field(default=0, ge=0)  # enters the seeds drawn for unseeded requests

    device: str = "auto"  # auto, cpu, cuda, mps, xpu (an index may follow: cuda:1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attn_implementation: str | None = None  # None: the best for the device
    quantization: Literal["int8", "int4"] | None = None  # of packed weights on a CPU; None: as the dtype says
    cpu_kernels: Literal["auto", "off"] = "auto"  # off: a CPU computes with torch alone
    comm: Literal["auto", "shm", "gloo"] = "auto"  # between CPU ranks: shared memory where they can
    compile: bool = False  # torch.compile of what no kernel of ours computes
    # How the model is served; auto: the fastest that proves. Which are for which model: shoal.model.ways.
    way: Literal["auto", "paged", "padded", "state", "recompute", "seq2seq", "packed", "alone"] = "auto"
    num_threads: int | None = Field(default=None, ge=1)  # CPU threads per rank; None: cores / ranks
    cpu_pinning: Literal["auto", "off"] = "auto"  # auto: CPU ranks keep to cores of their own
    async_scheduling: bool | None = None  # a step ahead; None: where the engine has a core for it

    max_model_len: int | None = Field(default=None, ge=1)  # tokens, prompt and output; None: the model's
    max_num_seqs: int = Field(default=256, ge=1)  # running at once
    max_num_batched_tokens: int = Field(default=2048, ge=1)  # in one step
    max_num_queued_requests: int | None = Field(default=None, ge=1)  # waiting; None: no bound
    max_num_queued_tokens: int | None = Field(default=None, ge=1)  # of their prompts; None: no bound
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)  # share of device memory
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)  # per rank; overrides the share
    num_gpu_blocks_override: int | None = Field(default=None, ge=1)
    block_size: int = Field(default=16, ge=1)  # tokens per KV block
    enable_prefix_caching: bool = True

    seed: int = 0
    step_timeout: float | None = Field(
        default=None, gt=0
    )  # seconds, then ranks count as hung; None: by speed
    max_restarts: int = Field(default=5, ge=0)  # of failed ranks, within restart_window
    restart_window: float = Field(default=600.0, gt=0)  # seconds
    standby_ranks: bool = False  # processes that have imported all and wait to replace ranks that fail
    load_timeout: float = Field(default=1800.0, gt=0)  # seconds for a rank to load

    @property
    def least_step_timeout_s(self) -> float:
        """The step timeout, as far as it can be told before anything was measured."""
        return self.step_timeout or _STEP_TIMEOUT_S

    @field_validator("quantization", mode="before")
    @classmethod
    def _no_quantization(cls, quantization: Any) -> Any:
        return None if quantization == "none" else quantization

    @field_validator("policy", mode="before")
    @classmethod
    def _plain_policy(cls, policy: Any) -> Any:
        """Classes by their names and tuples as lists, so that it can go to another process."""
        if isinstance(policy, os.PathLike):
            return os.fspath(policy)
        if not isinstance(policy, Mapping):
            return policy
        return {
            key.__name__ if isinstance(key, type) else key: list(value) if isinstance(value, tuple) else value
            for key, value in policy.items()
        }

    @model_validator(mode="before")
    @classmethod
    def _memory_alias(cls, data: Any) -> Any:
        if isinstance(data, dict) and "memory_utilization" in data:
            data = dict(data)
            data.setdefault("gpu_memory_utilization", data.pop("memory_utilization"))
        return data


def make_config(**options: Any) -> EngineConfig:
    """Validate engine options.

    Raises:
        ConfigError: the first option that is wrong; ``field`` names it.
    """
    if isinstance(options.get("model"), os.PathLike):
        options["model"] = os.fspath(options["model"])
    try:
        return EngineConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "extra_forbidden":
            known = ", ".join(EngineConfig.model_fields)
            raise ConfigError(f"{name}: no such option; there are: {known}", field=name) from None
        raise ConfigError(f"{name}: {first['msg']}, got {first['input']!r}", field=name) from None
