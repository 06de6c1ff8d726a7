"""What an offline measurement comes to: plain rows, and rows as plain data. Knows no engine and no output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.bench.cost import Share
from shoal.bench.verdict import Agreement, Likelihood
from shoal.bench.workloads import Workload

__all__ = ["Entry", "Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One contender in one row. ``agreement`` is None for the reference itself, and for other programs where
    something is drawn; ``likelihood`` for every other program."""

    name: str
    is_ours: bool
    seconds: tuple[float, ...]  # each round's
    output_tokens: tuple[int, ...]  # each round's
    tokens_per_s: float  # median
    ratio: float  # of tokens/s over the reference's, the median of the rounds' own ratios
    first_token_s: float | None
    accuracy: float | None
    agreement: Agreement | None
    likelihood: Likelihood | None
    share: Share | None = None  # of the machine's limits, where it was asked for and can be told

    @property
    def is_coherent(self) -> bool:
        """Computes what the reference computes."""
        ids = self.agreement is None or self.agreement.is_equal
        return ids and (self.likelihood is None or self.likelihood.is_equal)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, over the time after the first: medians of both."""
        if self.first_token_s is None:
            return None
        taken = sorted(self.seconds)[len(self.seconds) // 2] - self.first_token_s
        tokens = sorted(self.output_tokens)[len(self.output_tokens) // 2] - 1
        return tokens / taken if taken > 0 and tokens > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "name": self.name,
            "tokens_per_s": self.tokens_per_s,
            "ratio": self.ratio,
            "seconds": list(self.seconds),
            "output_tokens": list(self.output_tokens),
            "first_token_s": self.first_token_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "accuracy": self.accuracy,
            "coherent": self.is_coherent,
            "agreement": _agreement(self.agreement),
            "log_likelihood": _likelihood(self.likelihood),
            "share_of_machine": None if self.share is None else self.share.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One workload."""

    workload: Workload  # as scaled
    options: Mapping[str, Any]  # of the engine, but for what differs between settings
    entries: tuple[Entry, ...]  # the reference first
    notes: tuple[str, ...]

    @property
    def is_coherent(self) -> bool:
        """All our engines computed the same. Other programs are compared, not judged."""
        return all(entry.is_coherent for entry in self.entries if entry.is_ours)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "workload": self.workload.name,
            "prompts": self.workload.count,
            "max_tokens": self.workload.max_tokens,
            "options": dict(self.options),
            "source_ratio": self.workload.source_ratio,
            "coherent": self.is_coherent,
            "notes": list(self.notes),
            "entries": [entry.to_dict() for entry in self.entries],
        }


def _agreement(found: Agreement | None) -> dict[str, Any] | None:
    if found is None:
        return None
    first = found.first
    return {
        "requests": found.requests,
        "differing": found.differing,
        "ties": found.ties,
        "equal": found.is_equal,
        "first_difference": first
        and {
            "request": found.first_request,
            "position": first.position,
            "wanted": first.wanted,
            "got": first.got,
            "gap": first.gap if math.isfinite(first.gap) else None,
        },
    }


def _likelihood(found: Likelihood | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "positions": found.positions,
        "reference": found.reference,
        "other": found.other,
        "equal": found.is_equal,
    }
