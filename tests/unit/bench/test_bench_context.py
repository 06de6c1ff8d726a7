"""The time of a token over its context: a difference of two calls, and a line through all lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shoal.bench import contender
from shoal.bench.context import ContextOrder, ContextPoint, growth, measure_context
from shoal.bench.cost import Cost
from shoal.bench.roof import Roof
from shoal.engine.outputs import RequestOutput
from shoal.errors import UsageError
from shoal.sampling_params import SamplingParams
from support.toy import ToyEngine, table

COST = Cost(body_parameters=1, head_parameters=1, unread_parameters=0, pair_flops=1, window=None)


class Clock(ToyEngine):
    """A call takes 7 s, each token 2 s and a tenth for each token of context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(table())
        self.now = 0.0
        self.prompts: list[list[int]] = []
        monkeypatch.setattr(contender.time, "perf_counter", lambda: self.now)

    def generate(
        self, prompts: Sequence[list[int]], sampling_params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        ((prompt,), (params,)) = (prompts, sampling_params)
        assert params.max_tokens is not None and params.ignore_eos
        self.prompts.append(prompt)
        self.now += 7 + params.max_tokens * (2 + 0.1 * len(prompt))
        return super().generate(prompts, sampling_params)


def order(**changes: Any) -> ContextOrder:
    wanted = {"lengths": (8, 32, 9000), "tokens": 3, "repeats": 2, **changes}
    return ContextOrder({"model": "toy"}, vocab_size=40, max_model_len=100, **wanted)


def test_what_a_call_costs_drops_out_and_the_context_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Clock(monkeypatch)
    opened = []

    def open_engine(config: Any) -> Clock:
        opened.append(config)
        return engine

    short, long = measure_context(order(), COST, open_engine)
    assert opened[0].enable_prefix_caching
    assert short.ms_per_token == pytest.approx(1e3 * (2 + 0.1 * 8))
    assert long.ms_per_token == pytest.approx(1e3 * (2 + 0.1 * 32))
    assert (short.context, long.context) == (10, 34)
    assert short.kv_bytes == 8 * 10
    assert short.step_bytes == 4 * 40**2 + 8 * 10
    assert engine.prompts[-1][:8] == engine.prompts[0], "the longer context begins with the shorter"
    assert engine.is_shut_down


def point(kv_bytes: float, ms: float) -> ContextPoint:
    return ContextPoint(0, ms, kv_bytes, None, None, (ms,))


def test_growth_is_the_line_through_the_points() -> None:
    found = growth([point(0.0, 10.0), point(1e9, 60.0), point(2e9, 110.0)], Roof(2, 25e9, 1.0))
    assert found.base_ms == pytest.approx(10)
    assert found.ms_per_gbyte == pytest.approx(50)
    assert found.kv_gbytes_per_s == pytest.approx(20)
    assert found.bandwidth_share == pytest.approx(0.8)
    assert found.largest_deviation == pytest.approx(0, abs=1e-9)


def test_more_than_the_bytes_explain_shows_as_deviation() -> None:
    found = growth([point(0.0, 10.0), point(1e9, 20.0), point(2e9, 90.0)], None)
    assert found.largest_deviation > 0.3
    assert found.bandwidth_share is None


def test_context_that_costs_nothing_has_no_speed() -> None:
    assert growth([point(0.0, 10.0), point(1e9, 10.0)], Roof(1, 1e9, 1.0)).kv_gbytes_per_s is None


@pytest.mark.parametrize("wrong", [{"lengths": (8, 9000)}, {"lengths": ()}, {"tokens": 0}, {"repeats": 0}])
def test_what_shows_no_growth_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="lengths"):
        list(measure_context(order(**wrong), None, lambda _: ToyEngine(table())))
