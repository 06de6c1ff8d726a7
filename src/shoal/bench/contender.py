"""What takes part in a measurement; our engine under some options, for one. Knows no workload."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.bench.cost import Traffic
from shoal.config import EngineConfig, make_config
from shoal.engine.outputs import RequestOutput
from shoal.engine.protocol import EngineInfo
from shoal.errors import EngineError
from shoal.sampling_params import SamplingParams

__all__ = ["Contender", "Engine", "EngineContender", "OpenEngine", "Ran", "Setting", "open_engine"]


class Engine(Protocol):
    """What is asked of ``shoal.LLM``."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(
        self, prompts: Sequence[list[int]], sampling_params: Sequence[SamplingParams]
    ) -> list[RequestOutput]: ...

    def shutdown(self) -> None: ...


OpenEngine = Callable[[EngineConfig], Engine]


def open_engine(config: EngineConfig) -> Engine:
    """Load an engine of ours.

    Raises:
        UsageError: the model or an option is wrong.
        RankError: a rank failed while loading.
    """
    from shoal.engine.llm import LLM  # imports torch

    return LLM(config=config)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a list of prompts."""

    seconds: float
    ids: list[list[list[int]]]  # [prompt][branch][token]

    @property
    def num_tokens(self) -> int:
        """Output tokens of all branches."""
        return sum(len(branch) for request in self.ids for branch in request)


class Contender(Protocol):
    """Something whose speed is measured."""

    @property
    def name(self) -> str: ...

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Ran:
        """Serve all prompts together."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """One of our engines in a comparison: its name there, and the options that are its own."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


class EngineContender:
    """Our engine."""

    def __init__(self, name: str, options: Mapping[str, Any], open_engine: OpenEngine) -> None:
        self.name = name
        self.options = dict(options)
        self._engine = open_engine(make_config(**options))

    @property
    def traffic(self) -> Traffic:
        """What it holds, over all ranks."""
        info = self._engine.info
        return Traffic(
            weight_bytes=sum(rank["weight_bytes"] for rank in info.ranks),
            kv_bytes_per_token=sum(rank["kv_bytes_per_token"] for rank in info.ranks),
            embedding_item_bytes=4 if info.dtype == "float32" else 2,
        )

    @property
    def compiling(self) -> list[str]:
        """What it said of ``compile``."""
        return [n for n in self._engine.info.notes if n.startswith(("compiled", "not compiled"))]

    @property
    def threads(self) -> int | None:
        """CPU threads of all ranks; None where nobody said."""
        each = self.options.get("num_threads")
        return None if each is None else each * int(self.options.get("tensor_parallel_size", 1))

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Ran:
        """Serve all prompts together.

        Raises:
            EngineError: an answer failed; a run with holes is no measurement.
        """
        started = time.perf_counter()
        outputs = self._engine.generate(prompts, params)
        seconds = time.perf_counter() - started
        for index, output in enumerate(outputs):
            for branch in output.outputs:
                if branch.finish_reason in ("error", "abort"):
                    why = branch.error or branch.finish_reason
                    raise EngineError(f"{self.name}: prompt {index} has no answer: {why}")
        return Ran(seconds, [[branch.token_ids for branch in output.outputs] for output in outputs])

    def log_probabilities(self, contexts: Sequence[list[int]], tokens: Sequence[int]) -> list[float]:
        """What the model gives each token after its context: natural logarithms, of the raw logits.

        The token is forced by a bias, which raw logits do not have.
        """
        params = [
            SamplingParams(
                temperature=0.0,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                repetition_penalty=1.0,
                max_tokens=1,
                ignore_eos=True,
                logprobs=0,
                logit_bias={token: 100.0},
            )
            for token in tokens
        ]
        found: list[float] = []
        for output, token in zip(self._engine.generate(contexts, params), tokens, strict=True):
            branch = output.outputs[0]
            if branch.token_ids != [token] or not branch.logprobs:
                why = branch.error or f"gave {branch.token_ids} where {token} was forced"
                raise EngineError(f"{self.name}: {why}")
            found.append(branch.logprobs[0][token].logprob)
        return found

    def close(self) -> None:
        self._engine.shutdown()
