"""Scaling is read off rows: speed-up over the first rank count, efficiency over the growth in ranks."""

from __future__ import annotations

from shoal.bench.rows import Entry, Row
from shoal.bench.tp import DEFAULT_WORKLOADS, scaling
from shoal.bench.workloads import WORKLOADS


def entry(name: str, tokens_per_s: float, ratio: float, *, is_ours: bool = True) -> Entry:
    return Entry(
        name=name,
        is_ours=is_ours,
        seconds=(1.0,),
        output_tokens=(int(tokens_per_s),),
        tokens_per_s=tokens_per_s,
        ratio=ratio,
        first_token_s=None,
        accuracy=None,
        agreement=None,
        likelihood=None,
    )


def test_efficiency_is_the_speed_up_over_the_growth_in_ranks() -> None:
    entries = (
        entry("-tp 2", 50, 1.0),
        entry("-tp 4", 90, 1.8),
        entry("other", 9, 0.2, is_ours=False),
    )
    lines = list(scaling([Row(WORKLOADS["mixed_32"], {}, entries, ())], (2, 4), 3))
    assert [(line.ranks, line.threads_per_rank, line.speedup, line.efficiency) for line in lines] == [
        (2, 3, 1.0, 1.0),
        (4, 3, 1.8, 0.9),
    ]
    assert all(line.coherent and line.workload == "mixed_32" for line in lines)


def test_what_is_measured_by_default_exists() -> None:
    assert set(DEFAULT_WORKLOADS) <= WORKLOADS.keys()
