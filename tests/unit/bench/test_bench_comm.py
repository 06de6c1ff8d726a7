"""Collectives are measured between real processes, and orders that make no sense are refused."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.bench.comm import OPERATIONS, Order, measure
from shoal.errors import RankError, UsageError


def test_every_operation_is_measured_over_every_transport() -> None:
    order = Order(operations=OPERATIONS, sizes=(64, 8192), repeats=5)
    rows = measure(order)
    assert [(row.op, row.bytes, row.backend) for row in rows] == [
        (operation, size, backend)
        for operation in OPERATIONS
        for size in order.sizes
        for backend in order.backends
    ]
    for row in rows:
        assert row.ranks == 2
        assert 0 < row.median_us <= row.p90_us
        assert row.gbytes_per_s == pytest.approx(row.bytes / row.median_us / 1e3, rel=0.01, abs=1e-4)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"backends": ("shm", "pigeon")}, "backends"),
        ({"backends": ()}, "backends"),
        ({"operations": ("scatter",)}, "operations"),
        ({"ranks": 1}, "ranks"),
        ({"ranks": 9}, "ranks"),
        ({"repeats": 0}, "repeats"),
        ({"sizes": (4096, 6)}, "sizes"),
        ({"sizes": ()}, "sizes"),
        ({"sizes": (0,)}, "sizes"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_by_its_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        measure(Order(**wrong))
    assert caught.value.field == field


def test_a_rank_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.comm.torch_dist.open_store", lambda: (None, "127.0.0.1:1"))
    with pytest.raises(RankError, match="rank 0: RankError: rank 0 could not join its group"):
        measure(Order(backends=("shm",), timeout_s=0.5))
