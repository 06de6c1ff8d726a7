"""From what a caller asks to what the scheduler takes: defaults filled in, a seed drawn, ids checked.
Knows no queue and no text beyond the stop ids.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.engine.decoding import Decoding
from shoal.engine.prompts import BothPrompts
from shoal.errors import RequestError
from shoal.messages import SamplingSpec
from shoal.sampling_params import SamplingParams
from shoal.sched.beams import BeamGroup, BeamSpec
from shoal.sched.request import RequestSpec

__all__ = ["Admission"]

StopFinder = Callable[[SamplingParams], Callable[[Sequence[int]], str | None] | None]
"""Makes what tells the stop string in which an output ends."""


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
    decoding: Decoding | None = None  # of encoder-decoders: prompts are their encoders'
    num_admitted: int = 0  # counted by whoever admits: a refused request leaves no trace in later seeds

    def spec(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        stop_finder: StopFinder | None = None,
    ) -> RequestSpec:
        """The request as the scheduler takes it.

        Args:
            stop_finder: for beams, whose text nobody sees before their search is over.

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
        assert params.no_repeat_ngram_size is not None
        beams, num_candidates = self._search(params, barred, stop_finder)
        bias = dict.fromkeys(self.decoding.barred_ids if self.decoding else (), -math.inf)
        bias.update(params.logit_bias or {})
        branches = tuple(
            SamplingSpec(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                no_repeat_ngram_size=params.no_repeat_ngram_size,
                seed=seed % 2**64,
                branch=branch,
                min_tokens=params.min_tokens,
                stop_ids=tuple(sorted(barred)) if params.min_tokens else (),
                logprobs=None if beams else params.logprobs,  # beams bring their candidates'
                logit_bias=bias or None,
                num_candidates=num_candidates,
            )
            for branch in range(params.num_beams if beams else params.n)
        )
        return RequestSpec(
            request_id=request_id,
            **self._prompts(prompt_ids, params.forced_bos_token_id),
            sampling=branches,
            max_tokens=params.max_tokens,
            eos_ids=self.eos_ids,
            stop_ids=stop_ids,
            ignore_eos=params.ignore_eos,
            beams=beams,
        )

    def _prompts(self, prompt_ids: Sequence[int], forced_id: int | None) -> dict[str, Any]:
        """What the request begins with; of an encoder-decoder, on both sides."""
        decoder_ids = prompt_ids.decoder_ids if isinstance(prompt_ids, BothPrompts) else []
        decoding = self.decoding
        if decoding is None:
            if decoder_ids or forced_id is not None:
                field = "decoder_prompt" if decoder_ids else "forced_bos_token_id"
                raise RequestError(f"{field}: is for encoder-decoders, and the model is none", field=field)
            return {"prompt_ids": prompt_ids}
        forced_first = decoding.forced_first_id if forced_id is None else forced_id
        if decoder_ids[:1] != [decoding.start_id]:  # as transformers does
            decoder_ids = [decoding.start_id, *decoder_ids]
        return {
            "prompt_ids": decoder_ids,
            "encoder_ids": prompt_ids,
            "forced_first_id": forced_first if len(decoder_ids) == 1 else -1,
            "forced_last_id": decoding.forced_last_id,
        }

    @staticmethod
    def _search(
        params: SamplingParams,
        ending_ids: frozenset[int],
        stop_finder: StopFinder | None,
    ) -> tuple[BeamSpec | None, int]:
        """The beams that are wanted, if any, and how many candidates each must have."""
        if params.num_beams == 1:
            return None, 0
        assert params.length_penalty is not None and params.early_stopping is not None
        beams = BeamSpec(
            num_beams=params.num_beams,
            num_returned=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            find_stop=stop_finder(params) if stop_finder else None,
        )
        num_needed = BeamGroup.num_candidates(params.num_beams, len(ending_ids))
        return beams, max(num_needed, params.logprobs or 0)

    def _draw_seed(self) -> int:
        text = f"{self.seed}/{self.replica_index}/{self.num_admitted}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _check_ids(self, params: SamplingParams) -> None:
        forced = params.forced_bos_token_id
        named = {
            "stop_token_ids": params.stop_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "forced_bos_token_id": () if forced is None else (forced,),
        }
        for field, ids in named.items():
            beyond = [token for token in ids if token >= self.vocab_size]
            if beyond:
                raise RequestError(
                    f"{field}: token id {beyond[0]} is beyond the vocabulary of {self.vocab_size}",
                    field=field,
                )
