"""Logits in, one ``TokenResult`` per sequence out. Knows no model, no cache and no other step.

    logits ─ argmax, check ─┬─ greedy rows:            that is it ───┬─ logprobs of the raw logits ─ results
                            ├─ greedy and edited:  edit ─ argmax ────┤
                            ├─ others:      edit ─ filter ─ race ────┘
                            └─ beams:  log-softmax ─ edit ─ the most likely, as they are ─────────── results

Rows are independent: what one asks for, or breaks, never shows in another. Only rows that ask for a
processor are copied and edited; a batch that is all greedy costs one argmax.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.messages import SequenceStep, TokenResult
from shoal.sampling import noise, order, processors
from shoal.sampling.draw import draw
from shoal.sampling.processors import spec_of

__all__ = ["sample"]

_GREEDY_BELOW = 1e-5  # vLLM's bound: a lower temperature is greedy
_ID_BYTES = array("i").itemsize


@dataclass(slots=True)
class _Logprobs:
    """What one row reports beside its token."""

    chosen: float | None = None
    rank: int | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class _Choice:
    """Row by row: the token, or why there is none."""

    tokens: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    beams: list[int] = field(default_factory=list)  # rows of which the most likely tokens are wanted


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: Sequence[SequenceStep]) -> tuple[TokenResult, ...]:
    """Sample the next token of every sequence.

    Args:
        logits: [rows, vocab], any float dtype and device; not changed. Row i is of sequence i, at
            the last position of its share of the step.
        sequences: each with ``sampling`` set; the sampled token's position is
            ``start + len(token_ids)``.

    Returns:
        one result per sequence, in order. A row with NaN or +inf, or with no token left above -inf,
        gets ``error`` instead of a token.
    """
    assert logits.ndim == 2 and logits.shape[0] == len(sequences), (logits.shape, len(sequences))
    if not sequences:
        return ()
    raw = logits.to(torch.float32)
    choice = _choose(raw, sequences)
    reports = _logprobs(raw, sequences, choice.tokens)
    if choice.beams:
        reports |= _candidates(raw, sequences, choice.beams)
    return tuple(_result(row, sequence, choice, reports) for row, sequence in enumerate(sequences))


def _result(row: int, sequence: SequenceStep, choice: _Choice, reports: dict[int, _Logprobs]) -> TokenResult:
    token = choice.tokens.get(row)
    if token is None:
        return TokenResult(sequence_id=sequence.sequence_id, error=choice.errors[row])
    report = reports.get(row)
    if report is None:
        return TokenResult(sequence_id=sequence.sequence_id, token_id=token)
    return TokenResult(
        sequence_id=sequence.sequence_id,
        token_id=token,
        logprob=report.chosen,
        rank=report.rank,
        top_ids=report.top_ids,
        top_logprobs=report.top_logprobs,
    )


def _choose(raw: torch.Tensor, sequences: Sequence[SequenceStep]) -> _Choice:
    """Tokens or errors for all rows; greedy rows that are edited and drawn rows are two groups more."""
    choice = _Choice()
    edited: list[int] = []
    drawn: list[int] = []
    for row, (maximum, token, sequence) in enumerate(zip(*_greatest(raw), sequences, strict=True)):
        if not -math.inf < maximum < math.inf:
            choice.errors[row] = "the model's logits are NaN, infinite, or -inf for every token"
        elif (spec := spec_of(sequence)).num_candidates:
            choice.tokens[row] = token
            choice.beams.append(row)
        elif spec.temperature >= _GREEDY_BELOW:
            drawn.append(row)
        elif processors.needs_edit(sequence):
            edited.append(row)
        else:
            choice.tokens[row] = token
    for rows, is_greedy in ((edited, True), (drawn, False)):
        if rows:
            _choose_group(raw, sequences, rows, is_greedy, choice)
    return choice


def _greatest(scores: torch.Tensor) -> tuple[list[float], list[int]]:
    """Each row's greatest score and the first id that has it; a NaN counts as greater than all.

    On a CPU by numpy, whose argmax goes at the speed of memory: torch's takes five times as long.
    """
    if scores.device.type != "cpu":
        values, ids = scores.max(dim=-1)
        return values.tolist(), ids.tolist()
    rows = scores.numpy()
    first = rows.argmax(axis=-1)
    return rows[np.arange(len(rows)), first].tolist(), first.tolist()


def _choose_group(
    raw: torch.Tensor, sequences: Sequence[SequenceStep], rows: list[int], is_greedy: bool, choice: _Choice
) -> None:
    """Add the tokens (or errors) of ``rows`` to ``choice``."""
    own = [sequences[row] for row in rows]
    scores = _take(raw, rows)
    edited = [place for place, sequence in enumerate(own) if processors.needs_edit(sequence)]
    if edited:
        scores, dead = _edit(scores, own, edited)
        if dead:
            for place in dead:
                choice.errors[rows[place]] = (
                    "no token is left to sample: min_tokens, logit_bias, penalties or no_repeat_ngram_size "
                    "leave none finite"
                )
            alive = [place for place in range(len(rows)) if place not in dead]
            scores, rows, own = scores[alive], [rows[i] for i in alive], [own[i] for i in alive]
    if is_greedy:
        tokens = _greatest(scores)[1]
    else:
        tokens = draw(scores, [spec_of(s) for s in own], _keys(own, raw)).tolist()
    choice.tokens.update(zip(rows, tokens, strict=True))


def _candidates(
    raw: torch.Tensor, sequences: Sequence[SequenceStep], rows: list[int]
) -> dict[int, _Logprobs]:
    """The most likely tokens of beams. Edits come after the log-softmax, as in transformers' search."""
    own = [sequences[row] for row in rows]
    scores = raw[rows].log_softmax(dim=-1)
    processors.apply(scores, own)
    values, ids = order.largest(scores, max(spec_of(sequence).num_candidates for sequence in own))
    reports = {}
    for row, sequence, top_ids, top in zip(rows, own, ids.tolist(), values.tolist(), strict=True):
        count = min(spec_of(sequence).num_candidates, sum(value > -math.inf for value in top))
        reports[row] = _Logprobs(top_ids=tuple(top_ids[:count]), top_logprobs=tuple(top[:count]))
    return reports


def _take(raw: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The rows of ``raw``; itself if those are all."""
    return raw if len(rows) == raw.shape[0] else raw[rows]


def _edit(
    scores: torch.Tensor, sequences: Sequence[SequenceStep], edited: list[int]
) -> tuple[torch.Tensor, set[int]]:
    """A copy of ``scores`` with the rows ``edited`` processed, and the rows left without a token."""
    part = scores[edited]
    processors.apply(part, [sequences[place] for place in edited])
    maxima = part.amax(dim=-1).tolist()
    dead = {place for place, m in zip(edited, maxima, strict=True) if not -torch.inf < m < torch.inf}
    if len(edited) == len(sequences):
        return part, dead
    scores = scores.clone()
    scores[edited] = part
    return scores, dead


def _keys(sequences: Sequence[SequenceStep], like: torch.Tensor) -> torch.Tensor:
    """Noise keys, int32 [rows, 2], one per position to be sampled."""
    keys = []
    for sequence in sequences:
        spec = spec_of(sequence)
        position = sequence.start + len(sequence.token_ids) // _ID_BYTES
        keys.append(noise.row_key(spec.seed, spec.branch, position))
    return torch.tensor(keys, dtype=torch.int32, device=like.device).reshape(-1, 2)


def _logprobs(
    raw: torch.Tensor, sequences: Sequence[SequenceStep], tokens: dict[int, int]
) -> dict[int, _Logprobs]:
    """Log-probabilities of the unprocessed logits, for the rows that ask and have a token."""
    wanted = enumerate(spec_of(sequence).logprobs for sequence in sequences)
    counts = {row: count for row, count in wanted if count is not None and row in tokens}
    if not counts:
        return {}
    rows = list(counts)
    scores = _take(raw, rows)
    total = scores.logsumexp(dim=-1, keepdim=True)
    chosen_ids = torch.tensor([tokens[row] for row in rows], device=raw.device)
    chosen = (scores.gather(-1, chosen_ids[:, None]) - total).squeeze(-1).tolist()
    places = order.ranks(scores, chosen_ids).tolist()
    reports = {row: _Logprobs(c, p) for row, c, p in zip(rows, chosen, places, strict=True)}
    most = max(counts.values())
    if most > 0:
        values, ids = order.largest(scores, most)
        top = zip(rows, ids.tolist(), (values - total).tolist(), strict=True)
        for row, top_ids, top_logprobs in top:
            reports[row].top_ids = tuple(top_ids[: counts[row]])
            reports[row].top_logprobs = tuple(top_logprobs[: counts[row]])
    return reports
