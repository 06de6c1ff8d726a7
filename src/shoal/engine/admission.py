"""From what a caller asks to what the scheduler takes: defaults filled in, a seed drawn, ids checked.
Knows no queue and no text beyond the stop ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import RequestError
from shoal.messages import SamplingSpec
from shoal.sampling_params import SamplingParams
from shoal.sched.request import RequestSpec

__all__ = ["Admission"]


@dataclass(slots=True)
class Admission:
    """What one engine needs to admit requests.

    A request without a seed gets one here, once, from (engine seed, replica index, how many came before
    it): ranks and replays of this engine agree on it, replicas differ.
    """

    vocab_size: int
    eos_ids: frozenset[int]
    model_defaults: Mapping[str, Any]
    seed: int
    replica_index: int
    num_admitted: int = 0  # counted by whoever admits: a refused request leaves no trace in later seeds

    def spec(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> RequestSpec:
        """The request as the scheduler takes it.

        Raises:
            RequestError: not SamplingParams at all, or token ids beyond the vocabulary.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params: must be SamplingParams, got {type(params).__name__}",
                field="sampling_params",
            )
        params = params.with_defaults(self.model_defaults)
        self._check_ids(params)
        seed = params.seed if params.seed is not None else self._draw_seed()
        stop_ids = frozenset(params.stop_token_ids or ())
        barred = stop_ids if params.ignore_eos else stop_ids | self.eos_ids
        assert params.temperature is not None and params.top_p is not None and params.top_k is not None
        assert params.min_p is not None and params.repetition_penalty is not None
        branches = tuple(
            SamplingSpec(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                seed=seed % 2**64,
                branch=branch,
                min_tokens=params.min_tokens,
                stop_ids=tuple(sorted(barred)) if params.min_tokens else (),
                logprobs=params.logprobs,
                logit_bias=dict(params.logit_bias) if params.logit_bias else None,
            )
            for branch in range(params.n)
        )
        return RequestSpec(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=branches,
            max_tokens=params.max_tokens,
            eos_ids=self.eos_ids,
            stop_ids=stop_ids,
            ignore_eos=params.ignore_eos,
        )

    def _draw_seed(self) -> int:
        text = f"{self.seed}/{self.replica_index}/{self.num_admitted}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _check_ids(self, params: SamplingParams) -> None:
        named = {"stop_token_ids": params.stop_token_ids or (), "logit_bias": params.logit_bias or ()}
        for field, ids in named.items():
            beyond = [token for token in ids if token >= self.vocab_size]
            if beyond:
                raise RequestError(
                    f"{field}: token id {beyond[0]} is beyond the vocabulary of {self.vocab_size}",
                    field=field,
                )
