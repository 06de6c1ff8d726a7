"""How the time of a decoded token grows with the tokens before it, beside the bytes of keys and values that
are read for it. One request, whose context is filled once and grows: what is known stays in the prefix cache.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.bench.contender import EngineContender, OpenEngine, open_engine
from shoal.bench.cost import Cost
from shoal.bench.roof import Roof
from shoal.errors import UsageError
from shoal.sampling_params import SamplingParams

__all__ = ["LENGTHS", "ContextOrder", "ContextPoint", "Growth", "growth", "measure_context"]

LENGTHS = (256, 512, 1024, 2048, 4096, 8000)
_RANDOM_BELOW = 16000


@dataclass(frozen=True, slots=True)
class ContextOrder:
    """What to measure."""

    options: Mapping[str, Any]  # fields of EngineConfig
    vocab_size: int
    max_model_len: int
    lengths: Sequence[int] = LENGTHS  # tokens of context; what the model is too short for is left out
    tokens: int = 24  # decoded at each
    repeats: int = 5

    def fitting(self) -> list[int]:
        """The lengths that the model has room for, in order.

        Raises:
            UsageError: numbers out of range, or fewer than two lengths.
        """
        if self.tokens < 1 or self.repeats < 1 or min(self.lengths, default=1) < 1:
            raise UsageError("lengths, tokens and repeats: at least 1 each", field="lengths")
        found = sorted({n for n in self.lengths if n + self.tokens + 1 <= self.max_model_len})
        if len(found) < 2:
            raise UsageError(
                f"lengths: growth takes two; {len(found)} of them and {self.tokens + 1} tokens fit into the "
                f"{self.max_model_len} that the model serves",
                field="lengths",
            )
        return found


@dataclass(frozen=True, slots=True)
class ContextPoint:
    """One length."""

    context: int  # tokens in view, the mean of the tokens decoded
    ms_per_token: float  # median
    kv_bytes: float  # keys and values read for a token
    step_bytes: float | None  # these and the weights; None where shapes do not tell
    gbytes_per_s: float | None  # the latter over the time
    samples_ms: tuple[float, ...] = field(repr=False)  # each round's


@dataclass(frozen=True, slots=True)
class Growth:
    """The straight line through all points: time over bytes of keys and values."""

    base_ms: float  # of a token without context
    ms_per_gbyte: float
    kv_gbytes_per_s: float | None  # at which further keys and values are read; None: they cost nothing
    bandwidth_share: float | None  # the same over what the machine reads
    largest_deviation: float  # of a point from the line, over the point

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def measure_context(
    order: ContextOrder, cost: Cost | None = None, open_engine: OpenEngine = open_engine
) -> Iterator[ContextPoint]:
    """One point a length, each as soon as it is measured.

    A token's time is the difference of two calls that differ in how many tokens they decode; both find their
    prompt in the prefix cache, so that its cost, and that of a call, drops out.

    Raises:
        UsageError: the order cannot be carried out.
        EngineError: an engine failed.
    """
    lengths = order.fitting()
    draw = random.Random(0)
    below = min(order.vocab_size, _RANDOM_BELOW)
    ids = [draw.randrange(below) for _ in range(lengths[-1])]
    engine = EngineContender("context", {**order.options, "enable_prefix_caching": True}, open_engine)
    try:
        traffic = engine.traffic
        for length in lengths:
            samples = _decode_ms(engine, ids[:length], order.tokens, order.repeats)
            seen = length + (order.tokens + 1) / 2
            ms = statistics.median(samples)
            step = None if cost is None else traffic.step_bytes(cost, seen)
            yield ContextPoint(
                context=round(seen),
                ms_per_token=ms,
                kv_bytes=traffic.kv_bytes_per_token * seen,
                step_bytes=step,
                gbytes_per_s=None if step is None else step / ms / 1e6,
                samples_ms=tuple(samples),
            )
    finally:
        engine.close()


def growth(points: Sequence[ContextPoint], roof: Roof | None) -> Growth:
    """The line of least squares of the points' relative deviations.

    Args:
        points: at least two, of different lengths.
        roof: of the machine; None: not measured.
    """
    weights = [point.ms_per_token**-2 for point in points]
    x, y = [point.kv_bytes / 1e9 for point in points], [point.ms_per_token for point in points]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    covariance = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    slope = covariance / sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    base = mean_y - slope * mean_x
    speed = 1e3 / slope if slope > 0 else None
    return Growth(
        base_ms=base,
        ms_per_gbyte=slope,
        kv_gbytes_per_s=speed,
        bandwidth_share=None if roof is None or speed is None else speed * 1e9 / roof.bytes_per_s,
        largest_deviation=max(abs(base + slope * a - b) / b for a, b in zip(x, y, strict=True)),
    )


def _decode_ms(engine: EngineContender, prompt: list[int], tokens: int, repeats: int) -> list[float]:
    short, long = (
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (1, tokens + 1)
    )
    engine.run([prompt], [long])  # fills the cache
    found = []
    for _ in range(repeats):
        first, whole = engine.run([prompt], [short]).seconds, engine.run([prompt], [long]).seconds
        found.append(1e3 * (whole - first) / tokens)
    return found
