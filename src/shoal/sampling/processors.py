"""Edits of logits that a request asks for: logit_bias, min_tokens, penalties, repeated runs, forced tokens.
Knows no probabilities and draws nothing.

Every function takes float32 ``scores`` [rows, vocab] and the rows' ``SequenceStep``s, and edits in
place. All rows are edited at once, each with its own values, through (row, token id) pairs, so the
cost follows the number of pairs and not the vocabulary. Ids outside the vocabulary are ignored: they
were refused at admission.

Definitions. Bias: added. Barred: -inf. Repetition (Keskar et al. 2019, as in transformers): a
logit above 0 is divided by the penalty, any other multiplied, for every token of prompt and output.
Presence and frequency (OpenAI's): of the output only, ``- presence - frequency * count``. No repeated
n-grams (as in transformers): barred is what would make the last n tokens of prompt and output a run that
they hold already. Forced: 0, and all others -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from shoal.messages import SamplingSpec, SequenceStep

__all__ = ["apply", "needs_edit"]

_Ids = npt.NDArray[np.int32]


def spec_of(sequence: SequenceStep) -> SamplingSpec:
    """The sequence's sampling spec, which must be there."""
    assert sequence.sampling is not None, f"sequence {sequence.sequence_id} is not to be sampled"
    return sequence.sampling


def _bars_stop(sequence: SequenceStep) -> bool:
    spec = spec_of(sequence)
    return bool(spec.stop_ids) and sequence.num_output < spec.min_tokens


def needs_edit(sequence: SequenceStep) -> bool:
    """Whether :func:`apply` would change this sequence's row."""
    spec = spec_of(sequence)
    return bool(spec.logit_bias) or _bars_stop(sequence) or spec.needs_history or sequence.forced_id >= 0


def apply(scores: torch.Tensor, sequences: Sequence[SequenceStep]) -> None:
    """All edits in vLLM's order: bias and barred tokens, then repetition, frequency, presence; then, as in
    transformers, repeated n-grams and forced tokens.
    """
    _add_bias(scores, sequences)
    _bar_stop_ids(scores, sequences)
    _repetition(scores, sequences)
    _presence_and_frequency(scores, sequences)
    _bar_repeated_ngrams(scores, sequences)
    _force(scores, sequences)


def _pairs(
    scores: torch.Tensor, chosen: Iterable[tuple[int, Sequence[int] | _Ids]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat indices into ``scores`` of (row, ids) and the row of each; ids out of range left out."""
    vocab = scores.shape[1]
    rows, ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for row, row_ids in chosen:
        array = np.asarray(row_ids, dtype=np.int64)
        array = array[(array >= 0) & (array < vocab)]
        ids.append(array)
        rows.append(np.full(len(array), row, dtype=np.int64))
    row_of = np.concatenate(rows)
    flat = row_of * vocab + np.concatenate(ids)
    return torch.from_numpy(flat).to(scores.device), torch.from_numpy(row_of).to(scores.device)


def _values(
    sequences: Sequence[SequenceStep], read: Callable[[SamplingSpec], float], scores: torch.Tensor
) -> torch.Tensor:
    """One number per row, float32 on the scores' device."""
    return torch.tensor([read(spec_of(s)) for s in sequences], dtype=torch.float32, device=scores.device)


def _add_bias(scores: torch.Tensor, sequences: Sequence[SequenceStep]) -> None:
    vocab = scores.shape[1]
    flat, biases = [], []
    for row, sequence in enumerate(sequences):
        for token, bias in (spec_of(sequence).logit_bias or {}).items():
            if 0 <= token < vocab:
                flat.append(row * vocab + token)
                biases.append(bias)
    if flat:
        index = torch.tensor(flat, dtype=torch.int64, device=scores.device)
        added = torch.tensor(biases, dtype=torch.float32, device=scores.device)
        view = scores.view(-1)
        view[index] = view[index] + added


def _bar_stop_ids(scores: torch.Tensor, sequences: Sequence[SequenceStep]) -> None:
    barred = [(row, spec_of(s).stop_ids) for row, s in enumerate(sequences) if _bars_stop(s)]
    _bar(scores, barred)


def _bar_repeated_ngrams(scores: torch.Tensor, sequences: Sequence[SequenceStep]) -> None:
    barred = [
        (row, _completing(np.frombuffer(s.history, dtype=np.int32), spec_of(s).no_repeat_ngram_size))
        for row, s in enumerate(sequences)
        if spec_of(s).no_repeat_ngram_size
    ]
    _bar(scores, barred)


def _completing(history: _Ids, size: int) -> _Ids:
    """Every token that followed an earlier occurrence of the last ``size - 1`` tokens."""
    if len(history) < size:
        return history[:0]
    runs = np.lib.stride_tricks.sliding_window_view(history, size)
    prefix = history[len(history) - size + 1 :]
    followers: _Ids = runs[(runs[:, :-1] == prefix).all(axis=1), -1]
    return followers


def _bar(scores: torch.Tensor, barred: Sequence[tuple[int, Sequence[int] | _Ids]]) -> None:
    if barred:
        flat, _ = _pairs(scores, barred)
        scores.view(-1)[flat] = -torch.inf


def _force(scores: torch.Tensor, sequences: Sequence[SequenceStep]) -> None:
    forced = [(row, s.forced_id) for row, s in enumerate(sequences) if 0 <= s.forced_id < scores.shape[1]]
    for row, token in forced:
        scores[row] = -torch.inf
        scores[row, token] = 0.0


def _repetition(scores: torch.Tensor, sequences: Sequence[SequenceStep]) -> None:
    seen = [
        (row, np.frombuffer(s.history, dtype=np.int32))
        for row, s in enumerate(sequences)
        if spec_of(s).repetition_penalty != 1.0
    ]
    if not seen:
        return
    flat, row_of = _pairs(scores, seen)
    penalty = _values(sequences, lambda spec: spec.repetition_penalty, scores)[row_of]
    view = scores.view(-1)
    before = view[flat]
    # A token seen twice is written twice, with the same value.
    view[flat] = torch.where(before > 0, before / penalty, before * penalty)


def _presence_and_frequency(scores: torch.Tensor, sequences: Sequence[SequenceStep]) -> None:
    emitted = [
        (row, np.frombuffer(s.history, dtype=np.int32)[s.num_prompt :])
        for row, s in enumerate(sequences)
        if spec_of(s).presence_penalty != 0.0 or spec_of(s).frequency_penalty != 0.0
    ]
    if not emitted:
        return
    flat, _ = _pairs(scores, emitted)
    flat, counts = torch.unique(flat, return_counts=True)
    row_of = flat // scores.shape[1]
    presence = _values(sequences, lambda spec: spec.presence_penalty, scores)[row_of]
    frequency = _values(sequences, lambda spec: spec.frequency_penalty, scores)[row_of]
    view = scores.view(-1)
    view[flat] = view[flat] - frequency * counts - presence
