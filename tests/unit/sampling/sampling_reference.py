"""Sampling recomputed row by row in plain Python and numpy float64, the slow and obvious way.

Shares no code with shoal.sampling; the tests hold the two against each other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.messages import SamplingSpec, SequenceStep, pack_ids, unpack_ids

MASK_64 = (1 << 64) - 1


def make_sequence(
    sequence_id: int = 0,
    *,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    position: int | None = None,
    **spec: Any,
) -> SequenceStep:
    """A decode step of a sequence; ``position`` is the sampled token's."""
    prompt = [1, 2, 3] if prompt is None else prompt
    output = [] if output is None else output
    spec.setdefault("temperature", 1.0)
    sampling = SamplingSpec(**spec)
    position = len(prompt) + len(output) if position is None else position
    return SequenceStep(
        sequence_id=sequence_id,
        start=position - 1,
        token_ids=pack_ids([0]),
        block_ids=pack_ids([0]),
        sampling=sampling,
        num_output=len(output),
        history=pack_ids(prompt + output) if sampling.needs_history else b"",
        num_prompt=len(prompt) if sampling.needs_history else 0,
    )


def mix64(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK_64
    return value ^ value >> 31


def uniform(seed: int, branch: int, position: int, token: int) -> float:
    """The 31-bit uniform behind one token's noise, in float64."""
    state = 0
    for word in (seed, branch, position):
        state = mix64((state ^ word % 2**64) + 0x9E3779B97F4A7C15 & MASK_64)
    value = (token + (state >> 32)) % 2**32
    value ^= value >> 17
    value = (value * 0xED5AD4BB + state) % 2**32
    value ^= value >> 11
    value = value * 0xAC4C1B51 % 2**32
    value ^= value >> 15
    value = value * 0x31848BAB % 2**32
    value ^= value >> 14
    return (value % 2**31 + 0.5) / 2**31


def ordered(scores: np.ndarray) -> list[int]:
    """Token ids, greatest score first, lowest id first among equals."""
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def edited(logits: np.ndarray, sequence: SequenceStep) -> np.ndarray:
    """Bias, barred tokens and penalties, token by token."""
    spec = sequence.sampling
    assert spec is not None
    scores = logits.astype(np.float64)
    history = list(unpack_ids(sequence.history))
    output = history[sequence.num_prompt :]
    for token in range(len(scores)):
        scores[token] += (spec.logit_bias or {}).get(token, 0.0)
        if sequence.num_output < spec.min_tokens and token in spec.stop_ids:
            scores[token] = -math.inf
        if token in history:
            penalty = spec.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        count = output.count(token)
        if count:
            scores[token] -= spec.frequency_penalty * count + spec.presence_penalty
    return scores


def survivors(scores: np.ndarray, spec: SamplingSpec) -> dict[int, float]:
    """Token ids left by min_p, top_k and top_p, with their log-probabilities (not renormalised)."""
    scores = (scores - scores.max()) / spec.temperature
    kept = [t for t in ordered(scores) if spec.min_p == 0 or scores[t] >= math.log(spec.min_p)]
    if spec.top_k > 0:
        kept = kept[: spec.top_k]
    if spec.top_p < 1:
        probabilities = np.exp(scores[kept]) / np.exp(scores[kept]).sum()
        before = np.concatenate([[0.0], np.cumsum(probabilities)[:-1]])
        kept = [token for token, mass in zip(kept, before, strict=True) if mass < spec.top_p]
    return {token: float(scores[token]) for token in kept}


def chosen(logits: np.ndarray, sequence: SequenceStep) -> int:
    """The token to sample, by Gumbel-max over the survivors."""
    spec = sequence.sampling
    assert spec is not None
    scores = edited(logits, sequence)
    if spec.temperature == 0:
        return ordered(scores)[0]
    position = sequence.start + len(sequence.token_ids) // 4

    def noisy(item: tuple[int, float]) -> float:
        token, score = item
        return score - math.log(-math.log1p(-uniform(spec.seed, spec.branch, position, token)))

    return max(survivors(scores, spec).items(), key=noisy)[0]
