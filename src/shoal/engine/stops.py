"""Stop strings in text that arrives in pieces, and the text of a branch as a whole. Knows no token
that ends a sequence: end-of-sequence and stop token ids are for those who see ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from shoal.engine.detokenise import Detokeniser
from shoal.engine.text import Tokenizer
from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams

__all__ = ["BranchText", "StopFinder", "stop_finder"]

_BEFORE = 8  # tokens: the first ones decoded may be parts of a character


class StopFinder:
    """Cuts a stream of text at the first stop string.

    Text that may be the beginning of a stop string is held back until it is clear that it is not.

    Args:
        stops: non-empty strings.
        include_stop: leave the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next piece.

        Args:
            text: what was added.
            may_stop: False: a stop string that ends in this piece does not count.

        Returns:
            the text to give out, and the stop string found. Of several the one that begins first
            counts, then the one listed first. After one is found nothing may be pushed.
        """
        if not self._stops or not text:
            return text, None
        searched = len(self._held)
        buffer = self._held + text
        found = self._find(buffer, searched) if may_stop else None
        if found is not None:
            start, stop = found
            self._held = ""
            return buffer[: start + len(stop) if self._include_stop else start], stop
        num_kept = self._longest_beginning(buffer)
        self._held = buffer[len(buffer) - num_kept :]
        return buffer[: len(buffer) - num_kept], None

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        rest, self._held = self._held, ""
        return rest

    def _find(self, buffer: str, searched: int) -> tuple[int, str] | None:
        """The first stop string that ends after ``searched`` characters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0 and (best is None or start < best[0]):
                best = start, stop
        return best

    def _longest_beginning(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that a stop string, not yet complete, begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class BranchText:
    """Tokens of one branch in, final text out, until a stop string.

    Args:
        tokenizer: the model's.
        params: stop, include_stop_str_in_output, min_tokens and skip_special_tokens are read.

    Raises:
        RequestError: stop strings, and a model without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
        if stops and not tokenizer.is_present:
            raise RequestError("stop: this model has no tokenizer, so no text; use stop_token_ids", "stop")
        self._detokeniser = Detokeniser(tokenizer, params.skip_special_tokens)
        self._finder = StopFinder(stops, params.include_stop_str_in_output)
        self._has_stops = bool(stops)
        self._min_tokens = params.min_tokens
        self._is_stopped = False
        self.num_tokens = 0  # taken in, up to and including the one that completed a stop string

    def push(self, token_ids: Sequence[int], num_output: int) -> tuple[str, str | None]:
        """Take the next output tokens.

        Args:
            token_ids: those to take in; none of the branch's stop tokens, unless their text is wanted.
            num_output: output tokens of the branch so far, these included. As in vLLM, a stop string
                counts only if it ends in the text of a token after the first ``min_tokens``.

        Returns:
            the text that became final, and the stop string found, if one was. Then the text ends at
            it, tokens after the one that completed it were left alone (see ``num_tokens``), and
            nothing more may be pushed.
        """
        assert not self._is_stopped, "pushed after a stop string"
        if not self._has_stops:
            self.num_tokens += len(token_ids)
            detokeniser = self._detokeniser  # nearly always it is one token, of each branch in each step
            one = len(token_ids) == 1
            return detokeniser.push_one(token_ids[0]) if one else detokeniser.push(token_ids), None
        pieces = []
        for number, token in enumerate(token_ids, num_output - len(token_ids) + 1):
            text = self._detokeniser.push_one(token)
            self.num_tokens += 1
            piece, stop = self._finder.push(text, may_stop=number > self._min_tokens)
            pieces.append(piece)
            if stop is not None:
                self._is_stopped = True
                return "".join(pieces), stop
        return "".join(pieces), None

    def finish(self) -> str:
        """The rest of the text: what was held back. Empty after a stop string."""
        if self._is_stopped:
            return ""
        tail = self._detokeniser.finish()
        return self._finder.finish() + tail


def stop_finder(tokenizer: Tokenizer, params: SamplingParams) -> Callable[[Sequence[int]], str | None] | None:
    """What finds the stop string that an output's last token completes; None where there is none to find.

    For one output after the other, of which only the end is looked at: :class:`BranchText` goes with one, and
    finds the same.
    """
    stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    if not stops:
        return None
    ignored = tokenizer.special_ids if params.skip_special_tokens else frozenset()
    most = max(len(stop.encode()) for stop in stops) + _BEFORE  # a token has a byte at least

    def decoded(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, params.skip_special_tokens)

    def find(token_ids: Sequence[int]) -> str | None:
        if len(token_ids) <= params.min_tokens or token_ids[-1] in ignored:
            return None
        seen = [token for token in token_ids if token not in ignored]
        start = max(0, len(seen) - most)
        text = decoded(seen[start:])
        if text.endswith("\ufffd") or not any(stop in text for stop in stops):
            return None
        num_early = sum(token not in ignored for token in token_ids[: params.min_tokens])
        num_barred = len(decoded(seen[start:num_early]).rstrip("\ufffd"))  # characters: none may end in them
        starts = [(text.find(stop, max(0, num_barred - len(stop) + 1)), stop) for stop in stops]
        return min(((at, stop) for at, stop in starts if at >= 0), key=itemgetter(0), default=(0, None))[1]

    return find
