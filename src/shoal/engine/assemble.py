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
        self._num_top = params.logprobs or 0
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
        request, token, reason = update.request, update.token, update.finish_reason
        branch = request.branch
        text = self._texts[branch]
        token_ids = [] if token is None else [token.token_id]
        # Not shown is a token that ended the branch, unless that was asked for. (Of a stop string in which a
        # beam ended, the text is cut.)
        is_shown = reason != "stop" or self._shows_stop or isinstance(update.stop_reason, str)
        shown = token_ids if is_shown else []
        piece, stop = text.push(shown, text.num_tokens + len(shown))
        delta = CompletionDelta(branch, piece, token_ids)
        if token is not None and self._wants_logprobs and token.logprob is not None:
            delta.logprobs = [self._logprobs(token, token.logprob)]
        if stop is None and reason is None:
            return delta, None
        self._open.discard(branch)
        delta.error = update.error
        if stop is not None:  # it counts before the length: the text is what was asked for
            delta.finish_reason, delta.stop_reason = "stop", stop
            return delta, stop if reason is None else None
        delta.text += text.finish()
        delta.finish_reason, delta.stop_reason = reason, update.stop_reason
        return delta, None

    def fail(self, branch: int, error: str) -> CompletionDelta:
        """End a branch whose text cannot be made."""
        self._open.discard(branch)
        return CompletionDelta(index=branch, finish_reason="error", error=error)

    def delta(self, outputs: list[CompletionDelta]) -> RequestDelta:
        """The request's delta around its branches'."""
        leader = self._leader
        return RequestDelta(
            self._request_id, outputs, not self._open, leader.num_input, leader.num_cached or 0
        )

    def _logprobs(self, token: TokenResult, chosen: float) -> dict[int, TokenLogprob]:
        """The chosen token first, then the most likely ones in order."""
        decode = self._tokenizer.decode_token
        entries = {token.token_id: TokenLogprob(chosen, token.rank, decode(token.token_id))}
        pairs = zip(token.top_ids[: self._num_top], token.top_logprobs, strict=False)  # beams know more
        for place, (token_id, logprob) in enumerate(pairs, start=1):
            entries.setdefault(token_id, TokenLogprob(logprob, place, decode(token_id)))
        return entries
