"""The workloads, by name: prompts, sampling, and the flags that make a row what it is. Knows no engine.

Thirteen are those of the continuous-batching benchmark of huggingface/transformers pull request 45821, in
the order of its table; ``source_ratio`` is that table's speed-up of two GPUs over one (8B model, its
``TP1 tok/s`` to ``TP2 tok/s``). The others are this project's own. docs/benchmarks.md says what each means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from shoal.errors import UsageError
from shoal.sampling_params import SamplingParams

__all__ = ["SOURCE", "WORKLOADS", "Scale", "Workload", "fitted", "named"]

Kind = Literal["gsm8k", "instructions", "random", "mixed"]

_FEWEST_PROMPTS = 4
_FEWEST_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One row. ``count``, ``prompt_tokens``, ``shots`` and ``max_tokens`` are the source's until scaled."""

    name: str
    kind: Kind
    count: int  # prompts
    max_tokens: int  # output tokens a branch
    source_ratio: float | None = None
    prompt_tokens: int = 0  # of a random prompt, or the longest mixed one
    fewest_prompt_tokens: int = 0  # of mixed prompts
    shots: int = 0  # solved examples before each gsm8k question
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    flags: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineConfig
    cache_share: float | None = None  # KV blocks, as a share of what all requests need at once
    times_first_token: bool = False

    @property
    def is_bare(self) -> bool:
        """Every token of every prompt and answer is computed once: nothing is shared, none ends early."""
        return self.kind == "mixed"

    def params(self, index: int) -> SamplingParams:
        """Prompt ``index``'s sampling. Every field that a model may have a default for is set, and the seed
        is the prompt's own, so that engines of any rank count draw alike."""
        return SamplingParams(
            **{
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "max_tokens": self.max_tokens,
                "ignore_eos": self.ignore_eos,
                "seed": index,
                **self.sampling,
            }
        )

    def options(self, block_size: int, longest_prompt: int) -> dict[str, Any]:
        """The engine options of this row."""
        options = dict(self.flags)
        if self.cache_share is not None:
            one = -(-(longest_prompt + self.max_tokens) // block_size)
            options["num_gpu_blocks_override"] = max(one, math.ceil(one * self.count * self.cache_share))
        return options


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of the source's size is run: one factor for the number of prompts and for all lengths."""

    name: str
    factor: float

    @classmethod
    def parse(cls, text: str) -> Scale:
        """``full`` (1), ``small`` (1/8), ``ci`` (1/32), or a factor above 0 and up to 1.

        Raises:
            UsageError: anything else.
        """
        known = {"full": 1.0, "small": 1 / 8, "ci": 1 / 32}
        try:
            factor = known[text] if text in known else float(text)
        except ValueError:
            factor = math.nan
        if not 0 < factor <= 1:
            raise UsageError(
                f"scale: ci, small, full, or a factor above 0 and up to 1; got {text!r}", field="scale"
            )
        return cls(text, factor)

    def apply(self, workload: Workload) -> Workload:
        """The workload at this size. Few prompts and short lengths stay: a row must still be what it is."""
        changes = {
            "count": self._shrunk(workload.count, _FEWEST_PROMPTS),
            "max_tokens": self._shrunk(workload.max_tokens, _FEWEST_TOKENS),
            "prompt_tokens": self._shrunk(workload.prompt_tokens, _FEWEST_TOKENS),
            "fewest_prompt_tokens": self._shrunk(workload.fewest_prompt_tokens, _FEWEST_TOKENS),
            "shots": self._shrunk(workload.shots, 1),
        }
        return _changed(workload, **changes)

    def _shrunk(self, number: int, least: int) -> int:
        return min(number, max(least, round(number * self.factor)))


def fitted(workload: Workload, longest_prompt: int, max_model_len: int) -> tuple[Workload, str | None]:
    """The workload with outputs cut to what the model is made for, and a line that says so.

    Raises:
        UsageError: its prompts alone are too long.
    """
    room = max_model_len - longest_prompt
    if room < 1:
        raise UsageError(
            f"{workload.name}: a prompt has {longest_prompt} tokens, the model serves {max_model_len}; "
            "take a smaller scale",
            field="scale",
        )
    if workload.max_tokens <= room:
        return workload, None
    note = f"{room} output tokens instead of {workload.max_tokens}: the model serves {max_model_len} in all"
    return _changed(workload, max_tokens=room), note


def _changed(workload: Workload, **changes: Any) -> Workload:
    values = {f.name: getattr(workload, f.name) for f in fields(workload)}
    return Workload(**{**values, **changes})


_COMPILED = {"compile": True}


def _gsm8k(name: str, source_ratio: float, **changes: Any) -> Workload:
    return Workload(
        name=name,
        kind="gsm8k",
        count=120,
        shots=8,
        max_tokens=256,
        source_ratio=source_ratio,
        **changes,
    )


def _rollouts(length: int, source_ratio: float) -> Workload:
    return Workload(
        name=f"rollouts_{length}",
        kind="random",
        count=32,
        prompt_tokens=256,
        max_tokens=length,
        source_ratio=source_ratio,
        flags=_COMPILED,
    )


SOURCE: tuple[Workload, ...] = (
    _gsm8k("gsm8k_default", 1.49),
    _gsm8k("gsm8k_sampling", 1.35, sampling={"temperature": 0.6, "top_p": 0.9}),
    _gsm8k("gsm8k_compile", 1.50, flags=_COMPILED),
    _gsm8k("gsm8k_no_fast_decode", 1.49, flags={"attn_implementation": "sdpa"}),
    _gsm8k(
        "gsm8k_bare_bones",
        1.24,
        flags={
            "attn_implementation": "sdpa",
            "cpu_kernels": "off",
            "enable_prefix_caching": False,
            "async_scheduling": False,
        },
    ),
    Workload(
        name="ifeval_default",
        kind="instructions",
        count=64,
        max_tokens=1280,
        ignore_eos=False,
        source_ratio=1.92,
    ),
    _rollouts(1024, 1.34),
    _rollouts(2048, 1.38),
    _rollouts(4096, 1.43),
    _rollouts(8192, 1.51),
    _rollouts(16384, 1.77),
    Workload(
        name="few_blocks",
        kind="random",
        count=20,
        prompt_tokens=256,
        max_tokens=256,
        cache_share=0.4,  # the source's: 16 blocks of 256 tokens for 20 requests of 512
        source_ratio=1.21,
    ),
    Workload(
        name="multi_return_seq",
        kind="random",
        count=50,
        prompt_tokens=256,
        max_tokens=256,
        sampling={"temperature": 1.0, "n": 8},
        source_ratio=1.24,
    ),
)

_OWN: tuple[Workload, ...] = (
    Workload(
        name="mixed_32", kind="mixed", count=32, fewest_prompt_tokens=20, prompt_tokens=400, max_tokens=64
    ),
    Workload(
        name="one_request",
        kind="mixed",
        count=1,
        fewest_prompt_tokens=130,
        prompt_tokens=130,
        max_tokens=64,
        times_first_token=True,
    ),
)

WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in (*SOURCE, *_OWN)}


def named(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names, in this order; ``all`` is those of the source.

    Raises:
        UsageError: there is none of a name.
    """
    found: list[Workload] = []
    for name in names:
        if name != "all" and name not in WORKLOADS:
            raise UsageError(f"workload: {name!r} is none of all, {', '.join(WORKLOADS)}", field="workload")
        found += SOURCE if name == "all" else (WORKLOADS[name],)
    return found
