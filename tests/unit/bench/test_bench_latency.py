"""Latencies are summed up by nearest rank, and a request is good if it meets every target."""

from __future__ import annotations

import pytest

from shoal.bench.latency import Percentiles, Sample, Target, parse_targets, summarise
from shoal.errors import UsageError


def test_percentiles_are_values_that_occurred() -> None:
    found = Percentiles.of([index / 1000 for index in range(100, 0, -1)])
    assert (found.p50, found.p90, found.p95, found.p99) == pytest.approx((50, 90, 95, 99))
    assert found.mean == pytest.approx(50.5)
    assert Percentiles.of([0.25]) == Percentiles(250, 250, 250, 250, 250)


def test_a_samples_latencies_come_from_when_its_pieces_came() -> None:
    sample = Sample((0.5, 0.6, 0.8), 0.9, num_tokens=7)
    assert sample.ttft_s == 0.5
    assert sample.gaps_s == pytest.approx([0.1, 0.2])
    assert sample.mean_itl_s == pytest.approx(0.3 / 6), "pieces may hold several tokens"
    assert Sample((0.5,), 0.5, num_tokens=1).mean_itl_s == 0


def test_throughput_counts_what_succeeded_and_failures_are_told() -> None:
    samples = [Sample((0.1, 0.2), 0.3, 4), Sample.failed("503: busy"), Sample((0.3,), 0.4, 1)]
    found = summarise(samples, 2.0, ())
    assert (found.requests, found.failed, found.first_error) == (3, 1, "503: busy")
    assert (found.requests_per_s, found.output_tokens, found.output_tokens_per_s) == (1.0, 5, 2.5)
    assert found.good is None and found.goodput_per_s is None
    assert found.itl_ms is not None and found.itl_ms.p99 == pytest.approx(100)
    assert summarise(samples[1:], 1.0, ()).itl_ms is None


def test_goodput_counts_requests_that_meet_every_target() -> None:
    samples = [
        Sample((0.1, 0.2), 0.3, 2),
        Sample((0.7, 0.8), 0.9, 2),  # its first piece is late
        Sample((0.1, 0.9), 1.0, 2),  # its second one is
        Sample.failed("gone"),
    ]
    found = summarise(samples, 2.0, parse_targets(["ttft:500 itl:200"]))
    assert (found.good, found.goodput_per_s) == (1, 0.5)
    assert summarise(samples, 2.0, parse_targets(["ttft:500"])).good == 2
    assert summarise(samples, 2.0, parse_targets(["e2e:950"])).good == 2


def test_targets_come_apart_by_blanks_commas_and_repetition() -> None:
    expected = (Target("ttft", 500.0), Target("itl", 100.0))
    assert parse_targets(["ttft:500 itl:100"]) == expected
    assert parse_targets(["ttft:500,itl:100"]) == expected
    assert parse_targets(["ttft:500", "itl:100"]) == expected
    assert parse_targets([]) == ()


@pytest.mark.parametrize("text", ["tpot:5", "ttft", "ttft:", "ttft:fast", "itl:0", "e2e:-1", "itl:nan"])
def test_a_target_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_targets([text])
    assert caught.value.field == "goodput"
