"""A model of one table for tests of what measures engines: the next token's logits depend on the last token
alone. Samples by the product's own noise; needs no process and no checkpoint.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from shoal.config import EngineConfig
from shoal.engine.outputs import CompletionOutput, RequestOutput, TokenLogprob
from shoal.engine.protocol import EngineInfo
from shoal.errors import EngineError
from shoal.sampling.noise import exponential, row_key
from shoal.sampling_params import SamplingParams

VOCABULARY = 40


def table(seed: int = 0) -> list[list[float]]:
    """Logits [last token][next token]."""
    draw = random.Random(seed)
    return [[draw.gauss(0.0, 3.0) for _ in range(VOCABULARY)] for _ in range(VOCABULARY)]


class ToyEngine:
    """An engine as :class:`shoal.bench.contender.Engine` has it."""

    def __init__(self, logits: list[list[float]], calls: list[str] | None = None, name: str = "") -> None:
        self._logits = logits
        self._calls = calls if calls is not None else []
        self._name = name
        self.is_shut_down = False
        self.notes: tuple[str, ...] = ()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model="toy",
            architecture="Toy",
            max_model_len=4096,
            tensor_parallel_size=1,
            num_blocks=1,
            block_size=16,
            attention="none",
            dtype="float32",
            device="cpu",
            ranks=({"weight_bytes": 4 * VOCABULARY**2, "kv_bytes_per_token": 8},),
            notes=self.notes,
        )

    def generate(
        self, prompts: Sequence[list[int]], sampling_params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        self._calls.append(self._name)
        return [
            RequestOutput(
                request_id=str(index),
                prompt=None,
                prompt_token_ids=prompt,
                outputs=[self._branch(prompt, params, branch) for branch in range(params.n)],
                finished=True,
            )
            for index, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        ]

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _branch(self, prompt: list[int], params: SamplingParams, branch: int) -> CompletionOutput:
        assert params.max_tokens is not None
        ids, logprobs = list(prompt), []
        for _ in range(params.max_tokens):
            row = self._logits[ids[-1] % VOCABULARY]
            scores = [logit + (params.logit_bias or {}).get(token, 0.0) for token, logit in enumerate(row)]
            if params.temperature:
                scores = self._noisy(scores, params, branch, len(ids))
            token = max(range(VOCABULARY), key=scores.__getitem__)
            total = math.log(math.fsum(math.exp(logit) for logit in row))
            logprobs.append({token: TokenLogprob(row[token] - total)})
            ids.append(token)
        return CompletionOutput(
            index=branch, token_ids=ids[len(prompt) :], logprobs=logprobs, finish_reason="length"
        )

    def _noisy(self, scores: list[float], params: SamplingParams, branch: int, position: int) -> list[float]:
        assert params.seed is not None and params.temperature is not None
        keys = torch.tensor([row_key(params.seed, branch, position)], dtype=torch.int32)
        noise = exponential(keys, torch.arange(VOCABULARY, dtype=torch.int32))[0].log().tolist()
        return [score / params.temperature - n for score, n in zip(scores, noise, strict=True)]


class Toys:
    """Opens toy engines: one table for each rank count, and a record of who was opened and called."""

    def __init__(self, tables: dict[int, list[list[float]]]) -> None:
        self.tables = tables
        self.calls: list[str] = []
        self.opened: list[EngineConfig] = []
        self.engines: list[ToyEngine] = []
        self.most: int | None = None  # engines; one more fails
        self.notes: tuple[str, ...] = ()  # what every engine says of itself

    def __call__(self, config: EngineConfig) -> ToyEngine:
        if len(self.opened) == self.most:
            raise EngineError("a rank died")
        self.opened.append(config)
        size = config.tensor_parallel_size
        self.engines.append(ToyEngine(self.tables[size], self.calls, f"-tp {size}"))
        self.engines[-1].notes = self.notes
        return self.engines[-1]


class ToyTokenizer:
    """A token a letter; every answer decodes to ``says``."""

    def __init__(self, says: str = "", *, is_present: bool = True) -> None:
        self._says = says
        self.is_present = is_present
        self.has_chat_template = False
        self.vocab_size = VOCABULARY

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._says

    def render_chat(self, messages: Sequence[object]) -> list[int]:
        raise AssertionError("it has no chat template")
