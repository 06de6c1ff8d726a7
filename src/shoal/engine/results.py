"""Deltas put together into whole outputs, and those of a search in their own form. Knows no engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from shoal.engine.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionDelta,
    CompletionOutput,
    RequestDelta,
    RequestOutput,
)
from shoal.engine.text import Tokenizer
from shoal.sampling_params import SamplingParams

__all__ = ["Collector", "beam_search_output"]


class Collector:
    """One request's output so far."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        wants_logprobs = params.logprobs is not None
        branches = [
            CompletionOutput(
                index,
                logprobs=[] if wants_logprobs else None,
                cumulative_logprob=0.0 if wants_logprobs else None,
            )
            for index in range(params.n)
        ]
        self._output = RequestOutput(request_id, prompt, list(prompt_ids), branches)

    def push(self, delta: RequestDelta) -> None:
        """Add what is new."""
        self._output.finished = delta.finished
        self._output.num_cached_tokens = delta.num_cached_tokens
        for new in delta.outputs:
            self._add(self._output.outputs[new.index], new)

    def output(self) -> RequestOutput:
        """A copy as it stands now."""
        return copy.deepcopy(self._output)

    def final(self) -> RequestOutput:
        """The output itself, for when nothing will be added any more."""
        return self._output

    @staticmethod
    def _add(branch: CompletionOutput, new: CompletionDelta) -> None:
        branch.text += new.text
        branch.token_ids += new.token_ids
        if new.logprobs and branch.logprobs is not None:
            branch.logprobs += new.logprobs
            pairs = zip(new.token_ids, new.logprobs, strict=True)
            gained = sum(entry[token].logprob for token, entry in pairs)
            branch.cumulative_logprob = (branch.cumulative_logprob or 0.0) + gained
        if new.finish_reason is not None:
            branch.finish_reason, branch.stop_reason = new.finish_reason, new.stop_reason
            branch.error = new.error


def beam_search_output(output: RequestOutput, tokenizer: Tokenizer, has_encoder: bool) -> BeamSearchOutput:
    """A search's outcome in vLLM's form.

    Args:
        output: of a request with ``num_beams`` and ``logprobs``.
        has_encoder: the prompt was an encoder's, so it is no part of the sequences.
    """
    prompt_ids = [] if has_encoder else output.prompt_token_ids
    sequences = []
    for branch in output.outputs:
        tokens = prompt_ids + branch.token_ids
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=branch.logprobs or [],
                cum_logprob=branch.cumulative_logprob or 0.0,
                text=tokenizer.decode(tokens, False) if tokenizer.is_present else None,
                finish_reason=branch.finish_reason,
                stop_reason=branch.stop_reason,
            )
        )
    return BeamSearchOutput(sequences)
