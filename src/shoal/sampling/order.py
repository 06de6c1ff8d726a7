"""The total order of tokens in a row: greater logit first, lower id first among equals. Knows no
request and no probabilities.

Greedy choice, top_k, top_p, ranks and the most likely tokens of logprobs all use this one order, so
that ties (frequent in bf16) fall alike everywhere: ``top_k=1`` is greedy, and the greedy token has
rank 1 and comes first among the most likely.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["largest", "ranks"]

_PACKED_FROM = 1024  # so many wanted on a CPU, sorting packed keys takes less than half of torch's time
_SLACK = 32  # extra candidates, so that ties around the k-th place seldom need a full sort


def largest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``k`` tokens of each row, in order.

    Args:
        scores: float [rows, vocab], no NaN.
        k: at least 1; cut to the vocabulary.

    Returns:
        values [rows, k] and ids (int64) [rows, k]. Tokens at -inf come last, in no certain order.
    """
    vocab = scores.shape[1]
    k = min(k, vocab)
    if k >= _PACKED_FROM and scores.device.type == "cpu" and scores.dtype is torch.float32:
        return _largest_packed(scores, k)
    width = min(k + _SLACK, vocab)
    if width == vocab:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    values, ids = scores.topk(width, dim=-1)
    values, ids = _break_ties(values, ids)
    # Where the last candidate equals the k-th, tokens of that value with lower ids may be missing.
    kth = values[:, k - 1]
    cut_in_ties = ((kth == values[:, -1]) & (kth > -torch.inf)).nonzero().squeeze(-1)
    if cut_in_ties.numel():
        full_values, full_ids = scores[cut_in_ties].sort(dim=-1, descending=True, stable=True)
        values[cut_in_ties] = full_values[:, :width]
        ids[cut_in_ties] = full_ids[:, :width]
    return values[:, :k], ids[:, :k]


def _largest_packed(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`largest` by integers of 64 bits, each a score and, below it, a place from behind: no two equal.

    Row by row, so that a row's keys stay in the cache.
    """
    vocab = scores.shape[1]
    behind = torch.arange(vocab - 1, -1, -1)
    ids = torch.empty(scores.shape[0], k, dtype=torch.int64)
    for row, out in zip(scores, ids, strict=True):
        bits = row.add(0.0).view(torch.int32)  # one zero of the two
        bits ^= (bits >> 31) & 0x7FFFFFFF  # in the order of the floats
        keys = (bits.to(torch.int64) << 32).bitwise_or_(behind).numpy()
        first = np.sort(np.partition(keys, vocab - k)[vocab - k :] if k < vocab else keys)[::-1]
        out.copy_(torch.from_numpy(vocab - 1 - (first & 0xFFFFFFFF)))
    return scores.gather(-1, ids), ids


def _break_ties(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates (in any order) sorted by (value descending, id ascending)."""
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def ranks(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The place of one token per row, 1 being the first.

    Args:
        scores: float [rows, vocab].
        tokens: int64 [rows].

    Returns:
        int64 [rows].
    """
    own = scores.gather(-1, tokens[:, None])
    before = torch.arange(scores.shape[1], device=scores.device) < tokens[:, None]
    return ((scores > own) | ((scores == own) & before)).sum(dim=-1) + 1
