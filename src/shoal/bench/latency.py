"""Latencies summed up: percentiles, throughput, and goodput under targets. Knows no server and no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.errors import UsageError

__all__ = ["METRICS", "Percentiles", "Sample", "Summary", "Target", "parse_targets", "summarise"]

METRICS = ("ttft", "itl", "e2e")
_PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it; seconds from when it was sent."""

    stamps: tuple[float, ...]  # when each piece of output came
    end_s: float
    num_tokens: int  # as the server counts them, else the pieces
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> Sample:
        """A request without an answer."""
        return cls((), math.nan, 0, error)

    @property
    def ttft_s(self) -> float:
        """Time to the first piece."""
        return self.stamps[0]

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces; a piece may be more than one token."""
        return [later - earlier for earlier, later in zip(self.stamps, self.stamps[1:], strict=False)]

    @property
    def mean_itl_s(self) -> float:
        """Time per token after the first; 0 if there is only one."""
        after = self.num_tokens - 1
        return (self.stamps[-1] - self.stamps[0]) / after if after > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """What a good request keeps to."""

    metric: str  # one of METRICS; itl is the request's own mean
    most_ms: float

    def is_met(self, sample: Sample) -> bool:
        seconds = {"ttft": sample.ttft_s, "itl": sample.mean_itl_s, "e2e": sample.end_s}[self.metric]
        return seconds * 1e3 <= self.most_ms


def parse_targets(texts: Sequence[str]) -> tuple[Target, ...]:
    """``["ttft:500", "itl:100"]``, milliseconds; one text may hold several, by blanks or commas.

    Raises:
        UsageError: an unknown metric, or no number above 0.
    """
    targets = []
    for text in " ".join(texts).replace(",", " ").split():
        metric, _, number = text.partition(":")
        try:
            most_ms = float(number)
        except ValueError:
            most_ms = math.nan
        if metric not in METRICS or not most_ms > 0:
            raise UsageError(
                f"goodput: {text!r} is not METRIC:MILLISECONDS with a metric of {', '.join(METRICS)}",
                field="goodput",
            )
        targets.append(Target(metric, most_ms))
    return tuple(targets)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Nearest-rank percentiles of at least one value."""
        ordered = sorted(seconds)
        ranks = [ordered[math.ceil(p / 100 * len(ordered)) - 1] * 1e3 for p in _PERCENTS]
        return cls(math.fsum(ordered) / len(ordered) * 1e3, *ranks)


@dataclass(frozen=True, slots=True)
class Summary:
    """One load."""

    requests: int
    failed: int
    first_error: str | None
    seconds: float  # from the first request to the last answer
    requests_per_s: float  # that succeeded
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles | None  # of all gaps between pieces; None: no request had two
    e2e_ms: Percentiles
    good: int | None = None  # requests that met every target; None: there are no targets
    goodput_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def summarise(samples: Sequence[Sample], seconds: float, targets: Sequence[Target]) -> Summary:
    """Sum up a load; at least one request succeeded.

    Args:
        samples: one a request.
        seconds: from the first request to the last answer.
        targets: a request that failed meets none.
    """
    done = [sample for sample in samples if sample.error is None]
    errors = [sample.error for sample in samples if sample.error is not None]
    gaps = [gap for sample in done for gap in sample.gaps_s]
    tokens = sum(sample.num_tokens for sample in done)
    good = sum(all(target.is_met(sample) for target in targets) for sample in done) if targets else None
    return Summary(
        requests=len(samples),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        seconds=seconds,
        requests_per_s=len(done) / seconds,
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds,
        ttft_ms=Percentiles.of([sample.ttft_s for sample in done]),
        itl_ms=Percentiles.of(gaps) if gaps else None,
        e2e_ms=Percentiles.of([sample.end_s for sample in done]),
        good=good,
        goodput_per_s=good / seconds if good is not None else None,
    )
