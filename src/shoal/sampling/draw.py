"""One token per row by temperature, min_p, top_k, top_p and noise. Knows no penalties, no logprobs.

The exponential race: the token with the greatest ``probability / noise`` wins. Since a token's noise
is a function of its own id (:mod:`shoal.sampling.noise`), only tokens that survive the filters need
any, and logits that move by an ulp move the winner only where two contenders are that close.

The filters are vLLM's, in its order: after the temperature, min_p drops tokens less likely than
``min_p`` times the most likely one; top_k keeps the first k in :mod:`shoal.sampling.order`; top_p
keeps the shortest run of first tokens whose renormalised probabilities reach ``top_p``. Each keeps a
run of first tokens and always the very first, so they are applied to a sorted run of candidates, which
is widened for the rows it turns out too short for: at once by as much as is missing at least, were all
further tokens as likely as the last candidate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shoal.messages import SamplingSpec
from shoal.sampling import noise, order

__all__ = ["draw"]

_TOP_K_WIDTH = 64  # candidates first sorted for top_k
_TAIL_WIDTH = 256  # candidates first sorted for top_p or min_p alone, whose reach is not known before
_WIDER = 8
_ROUNDING = 1e-3  # of a sum of probabilities, and more
_CPU_BLOCK = 1 << 16  # tokens raced at once: the block and its noise stay in a core's cache
_DEVICE_BLOCK = 1 << 24  # bounds the scratch memory on an accelerator
# exp(-80) keeps clear of float32's denormals, on which exp is many times slower. It cannot win a race:
# the most likely token scores at least 1/16.7, such a token at most 1e-25.
_LOWEST = -80.0


def draw(scores: torch.Tensor, specs: Sequence[SamplingSpec], keys: torch.Tensor) -> torch.Tensor:
    """Sample one token per row.

    Args:
        scores: float32 [rows, vocab]; the maximum of each row is finite. Not changed.
        specs: the rows' parameters; temperatures of at least 1e-5.
        keys: int32 [rows, 2], of :func:`shoal.sampling.noise.row_key`.

    Returns:
        int64 [rows].
    """
    filters = _Filters.of(specs, scores)
    tokens = torch.empty(len(specs), dtype=torch.int64, device=scores.device)
    for width, rows in _by_width(specs, scores.shape[1]).items():
        _draw_group(scores, filters, keys, rows, width, tokens)
    return tokens


# Python's floats reach beyond float32's: a temperature of infinity would turn a barred -inf into NaN, and a
# top_p of 0 would drop the most likely token, too.
_HOTTEST = torch.finfo(torch.float32).max
_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class _Filters:
    """The rows' parameters, each float32 [rows, 1]; a value that drops nothing where one is unset."""

    temperature: torch.Tensor
    floor: torch.Tensor  # log of min_p
    top_k: torch.Tensor
    top_p: torch.Tensor  # inf for 1: nothing is dropped, however the sum of probabilities is rounded

    @classmethod
    def of(cls, specs: Sequence[SamplingSpec], scores: torch.Tensor) -> _Filters:
        vocab = scores.shape[1]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]

        return cls(
            temperature=column([min(s.temperature, _HOTTEST) for s in specs]),
            floor=column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in specs]),
            top_k=column([s.top_k if 0 < s.top_k < vocab else vocab for s in specs]),
            top_p=column([max(s.top_p, _LEAST) if s.top_p < 1 else math.inf for s in specs]),
        )

    def __getitem__(self, rows: torch.Tensor) -> _Filters:
        return _Filters(self.temperature[rows], self.floor[rows], self.top_k[rows], self.top_p[rows])


def _by_width(specs: Sequence[SamplingSpec], vocab: int) -> dict[int, list[int]]:
    """Rows by how many candidates to sort first; 0 stands for none: nothing is filtered."""
    groups: dict[int, list[int]] = defaultdict(list)
    for row, spec in enumerate(specs):
        if 0 < spec.top_k < vocab:
            width = _TOP_K_WIDTH
            while width < spec.top_k:
                width = _widened(width, vocab)
        else:
            width = _TAIL_WIDTH if spec.top_p < 1 or spec.min_p > 0 else 0
        groups[min(width, vocab)].append(row)
    return groups


def _widened(width: int, vocab: int) -> int:
    """The next width; near the vocabulary's size sorting everything is as cheap."""
    wider = width * _WIDER
    return wider if 2 * wider <= vocab else vocab


def _draw_group(
    scores: torch.Tensor,
    filters: _Filters,
    keys: torch.Tensor,
    rows: list[int],
    width: int,
    tokens: torch.Tensor,
) -> None:
    """Fill ``tokens[rows]``; rows for which ``width`` candidates are too few are drawn again, wider."""
    vocab = scores.shape[1]
    index = torch.tensor(rows, device=scores.device)
    own = scores if len(rows) == scores.shape[0] else scores[index]
    if width == 0:
        tokens[index] = _race_all(own, filters[index], keys[index])
        return
    values, ids = order.largest(own, width)
    values, needed = _filter(own, values, filters[index])
    tokens[index] = _race(values, ids, keys[index])
    wider: dict[int, list[int]] = defaultdict(list)
    for row, least in zip(rows, needed.tolist(), strict=True):
        next_width = width
        while next_width < min(least, vocab):
            next_width = _widened(next_width, vocab)
        if next_width > width:
            wider[next_width].append(row)
    for next_width, open_rows in wider.items():
        _draw_group(scores, filters, keys, open_rows, next_width, tokens)


def _temper(scores: torch.Tensor, maximum: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``(scores - maximum) / temperature``: in this order nothing overflows."""
    return (scores - maximum).div_(temperature)


def _filter(
    scores: torch.Tensor, values: torch.Tensor, filters: _Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply temperature, min_p, top_k and top_p to sorted candidates.

    Args:
        scores: [rows, vocab], where the candidates come from.
        values: [rows, width], the first ones in order.
        filters: of the rows.

    Returns:
        the tempered values [rows, width], -inf where dropped; and float32 [rows]: of how many candidates a
        row needs at least, ``width`` if all that survives is among these.
    """
    width = values.shape[1]
    maximum = values[:, :1].clone()
    values = _temper(values, maximum, filters.temperature)
    places = torch.arange(width, device=values.device)
    dropped = (values < filters.floor) | (places >= filters.top_k)
    values.masked_fill_(dropped, -torch.inf)
    complete = (values[:, -1] == -torch.inf) | (filters.top_k.squeeze(-1) <= width)
    if width == scores.shape[1]:
        complete = torch.ones_like(complete)
    short = torch.where(complete, width, width + 1.0)
    if bool((filters.top_p == torch.inf).all()):
        return values, short
    total = values.exp().sum(dim=-1, keepdim=True)
    if not bool(complete.all()):
        open_rows = (~complete).nonzero().squeeze(-1)
        total[open_rows] = _mass(scores[open_rows], maximum[open_rows], filters[open_rows])
    probabilities = values.exp() / total
    reached = probabilities.cumsum(dim=-1)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    missing = (filters.top_p - reached[:, -1:]).squeeze(-1)
    values.masked_fill_(before >= filters.top_p, -torch.inf)
    further = (missing - _ROUNDING).clamp_(min=0) / probabilities[:, -1]
    further.masked_fill_(missing == torch.inf, 0)  # no top_p: what the other filters leave is not known
    return values, torch.where(complete | (missing <= 0), width, short + further)


def _likelihoods(
    scores: torch.Tensor, maximum: torch.Tensor, temperature: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Unnormalised probabilities of whole rows, a block of rows at a time; fresh tensors."""
    rows, vocab = scores.shape
    block = max(1, (_CPU_BLOCK if scores.device.type == "cpu" else _DEVICE_BLOCK) // vocab)
    for start in range(0, rows, block):
        part = slice(start, start + block)
        yield part, _temper(scores[part], maximum[part], temperature[part]).clamp_(min=_LOWEST).exp_()


def _mass(scores: torch.Tensor, maximum: torch.Tensor, filters: _Filters) -> torch.Tensor:
    """Sum of the unnormalised probabilities of whole rows that min_p leaves, [rows, 1]."""
    has_floor = bool((filters.floor > -math.inf).any())
    sums = []
    for part, likelihood in _likelihoods(scores, maximum, filters.temperature):
        if has_floor:
            likelihood.mul_(likelihood >= filters.floor[part].exp())
        sums.append(likelihood.sum(dim=-1, keepdim=True))
    return torch.cat(sums)


def _race(values: torch.Tensor, ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The winners among candidates: values [rows, n], ids int64 [rows, n]; the lowest id of equals."""
    score = values.exp() / noise.exponential(keys, ids.to(torch.int32))
    behind = score < score.amax(dim=-1, keepdim=True)
    return ids.masked_fill(behind, torch.iinfo(torch.int64).max).amin(dim=-1)


def _race_all(scores: torch.Tensor, filters: _Filters, keys: torch.Tensor) -> torch.Tensor:
    """The winners over the whole vocabulary."""
    ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    maximum = scores.amax(dim=-1, keepdim=True)
    return torch.cat(
        [
            likelihood.div_(noise.exponential(keys[part], ids)).argmax(dim=-1)
            for part, likelihood in _likelihoods(scores, maximum, filters.temperature)
        ]
    )
