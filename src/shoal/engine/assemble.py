"""One request's outputs put together as tokens come: text, logprobs, finish reasons. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.engine.outputs import CompletionDelta, RequestDelta, TokenLogprob
from shoal.engine.stops import BranchText
from shoal.engine.text import Tokenizer
from shoal.messages import TokenResult
from shoal.sampling_params import SamplingParams
from shoal.sched.request import BranchUpdate, Request

__all__ = ["Assembly"]


class Assembly:
    """A request's branches as its caller sees them."""

    def __init__(
        self, request_id: str, branches: Sequence[Request], tokenizer: Tokenizer, params: SamplingParams
    ) -> None:
        self._request_id = request_id
        self._leader = branches[0]
        self._tokenizer = tokenizer
        self._wants_logprobs = params.logprobs is not None
        self._shows_stop = params.include_stop_str_in_output
        self._texts = {request.branch: BranchText(tokenizer, params) for request in branches}
        self._open = set(self._texts)

    @property
    def is_finished(self) -> bool:
        """Every branch has ended."""
        return not self._open

    def push(self, update: BranchUpdate) -> tuple[CompletionDelta, str | None]:
        """What an update brings its branch.

        Returns:
            the delta, and the stop string that ended the branch if one did (the scheduler does not know
            of it yet).
        """
        branch = update.request.branch
        text = self._texts[branch]
        piece, stop = text.push(self._shown(update), update.request.num_output)
        reason: str | None = update.finish_reason
        stop_reason: int | str | None = update.stop_reason
        ended_by: str | None = None
        if stop is not None:
            # A stop string counts before the length: the text is what was asked for.
            ended_by = stop if reason is None else None
            reason, stop_reason = "stop", stop
        elif reason is not None:
            piece += text.finish()
        if reason is not None:
            self._open.discard(branch)
        delta = CompletionDelta(
            index=branch,
            text=piece,
            token_ids=update.token_ids,
            logprobs=self._logprobs(update.token),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=update.error,
        )
        return delta, ended_by

    def fail(self, branch: int, error: str) -> CompletionDelta:
        """End a branch whose text cannot be made."""
        self._open.discard(branch)
        return CompletionDelta(index=branch, finish_reason="error", error=error)

    def _shown(self, update: BranchUpdate) -> list[int]:
        """The ids whose text is shown: not a token that ended the branch, unless that was asked for."""
        if update.finish_reason == "stop" and not self._shows_stop:
            return update.token_ids[:-1]
        return update.token_ids

    def delta(self, outputs: list[CompletionDelta]) -> RequestDelta:
        """The request's delta around its branches'."""
        return RequestDelta(
            request_id=self._request_id,
            outputs=outputs,
            finished=self.is_finished,
            num_prompt_tokens=self._leader.num_prompt,
            num_cached_tokens=self._leader.num_cached or 0,
        )

    def _logprobs(self, token: TokenResult | None) -> list[dict[int, TokenLogprob]] | None:
        """The chosen token first, then the most likely ones in order."""
        if token is None or not self._wants_logprobs or token.logprob is None:
            return None
        decode = self._tokenizer.decode_token
        entries = {token.token_id: TokenLogprob(token.logprob, token.rank, decode(token.token_id))}
        pairs = zip(token.top_ids, token.top_logprobs, strict=True)
        for place, (token_id, logprob) in enumerate(pairs, start=1):
            entries.setdefault(token_id, TokenLogprob(logprob, place, decode(token_id)))
        return [entries]
