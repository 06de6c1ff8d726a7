"""Prometheus metrics of one server, in a registry of its own. Knows no engine and no HTTP: counters
and gauges are read from whatever has the attributes of :class:`Stats`, latencies are told to a
:class:`RequestTimer`.

Names are vLLM's (docs.vllm.ai, "Production metrics") with ``shoal:`` in place of ``vllm:``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["METRICS_CONTENT_TYPE", "RequestTimer", "ServerMetrics", "Stats"]

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABEL = "model_name"

_GAUGES = (
    ("num_requests_running", "num_running", "Requests in the running batch."),
    ("num_requests_waiting", "num_waiting", "Requests that wait to be scheduled."),
    ("num_queued_requests", "num_queued_requests", "Of these, beyond what the next step has room for."),
    ("num_queued_tokens", "num_queued_tokens", "Prompt tokens of the requests that wait."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Share of KV blocks in use; 1 is all of them."),
    (
        "kv_cache_window_usage_perc",
        "kv_cache_window_usage",
        "Share of the KV blocks in use of layers that keep no more than a sliding window.",
    ),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens_total", "Prompt tokens processed."),
    ("generation_tokens", "generation_tokens_total", "Tokens generated."),
    ("prefix_cache_queries", "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    ("num_preemptions", "preemptions_total", "Requests put back to be recomputed."),
    ("engine_steps", "steps_total", "Steps the engine has run."),
    ("engine_restarts", "restarts_total", "Times the ranks were started anew after a failure."),
    ("num_replays", "replays_total", "Sequences put back because the ranks had failed."),
)
_LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_REASONS = ("queue_full", "request_timeout", "client_gone", "engine_error")
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Stats(Protocol):
    """Counters and gauges at one instant (``engine.protocol.EngineStats`` is one)."""

    num_running: int
    num_waiting: int
    num_queued_requests: int
    num_queued_tokens: int
    kv_cache_usage: float
    kv_cache_window_usage: float
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    preemptions_total: int
    steps_total: int
    restarts_total: int
    replays_total: int
    requests_total: dict[str, int]


class _StatsCollector(Collector):
    """Reads the engine's own numbers at each scrape, so that none is kept twice."""

    def __init__(self, model_name: str, read: Callable[[], Stats | None]) -> None:
        self._labels = [model_name]
        self._read = read

    def collect(self) -> Iterable[Metric]:
        stats = self._read()
        if stats is None:
            return
        for name, attribute, text in _GAUGES:
            gauge = GaugeMetricFamily(f"shoal:{name}", text, labels=[_LABEL])
            gauge.add_metric(self._labels, getattr(stats, attribute))
            yield gauge
        for name, attribute, text in _COUNTERS:
            counter = CounterMetricFamily(f"shoal:{name}", text, labels=[_LABEL])
            counter.add_metric(self._labels, getattr(stats, attribute))
            yield counter
        yield self._finished(stats.requests_total)

    def _finished(self, by_reason: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(
            "shoal:request_success", "Requests finished.", labels=[_LABEL, "finished_reason"]
        )
        for reason, count in sorted(by_reason.items()):
            family.add_metric([*self._labels, reason], count)
        return family


class ServerMetrics:
    """All metrics of one server.

    Args:
        model_name: the label every series carries.
        read_stats: the engine's numbers now, or None while there is no engine.
    """

    def __init__(self, model_name: str, read_stats: Callable[[], Stats | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StatsCollector(model_name, read_stats))
        self._model_name = model_name
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one branch.", _INTER_TOKEN_BUCKETS
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_BUCKETS
        )
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", _TOKEN_BUCKETS
        )

        self._failures = Counter(
            "shoal:request_failures",
            "Requests that were refused, failed, timed out or were left by their client.",
            [_LABEL, "reason"],
            registry=self.registry,
        )
        for reason in _REASONS:  # a series that is there from the start shows its first increase
            self._failures.labels(model_name, reason)

    def count(self, reason: str) -> None:
        """A request ended without its whole answer, for ``reason``: a word of ours, never a client's."""
        self._failures.labels(self._model_name, reason).inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"shoal:{name}", text, [_LABEL], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name)

    def timer(self) -> RequestTimer:
        """A timer for a request that arrives now."""
        return RequestTimer(self)

    def exposition(self) -> bytes:
        """Every series in Prometheus' text format (``METRICS_CONTENT_TYPE``)."""
        return generate_latest(self.registry)


class RequestTimer:
    """The latencies of one request, observed as its tokens come."""

    def __init__(self, metrics: ServerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._last: dict[int, float] = {}  # branch -> when its last token came
        self._num_generated = 0

    def tokens(self, branch: int, count: int) -> None:
        """``count`` tokens of ``branch`` came now."""
        if count == 0:
            return
        now = self._clock()
        if not self._last:
            self._metrics.first_token.observe(now - self._started)
        previous = self._last.get(branch)
        if previous is not None:
            for _ in range(count):  # tokens that came together share the wait
                self._metrics.inter_token.observe((now - previous) / count)
        self._last[branch] = now
        self._num_generated += count

    def finished(self, num_prompt_tokens: int) -> None:
        """The request is complete."""
        self._metrics.end_to_end.observe(self._clock() - self._started)
        self._metrics.prompt_tokens.observe(num_prompt_tokens)
        self._metrics.generation_tokens.observe(self._num_generated)
