"""``shoal bench`` measures what it is asked to, and prints a table or JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shoal.bench.comm import Order, Row
from shoal.bench.context import ContextPoint
from shoal.bench.cost import Ceiling, Cost
from shoal.bench.latency import Sample, Target, summarise
from shoal.bench.offline import Subject, measure
from shoal.bench.roof import Roof
from support.toy import Toys, ToyTokenizer, table


@pytest.fixture
def orders(monkeypatch):
    """What would have been measured; every order gets one row."""
    seen = []

    def measure(order):
        seen.append(order)
        return [Row("shm", "all_reduce", 4096, 2, 3.25, 4.5, 1.26)]

    monkeypatch.setattr("shoal.bench.comm.measure", measure)
    return seen


def test_every_option_reaches_the_order(run, orders):
    ended = run(
        "bench", "comm", "--ranks", "3", "--sizes", "96,4800", "--backends", "shm", "--repeats", "7",
        "--operations", "broadcast,all_gather", "--json",
    )  # fmt: skip
    assert ended.status == 0
    assert orders == [
        Order(
            backends=("shm",),
            operations=("broadcast", "all_gather"),
            sizes=(96, 4800),
            ranks=3,
            repeats=7,
        )
    ]


def test_json_is_one_document_of_rows(run, orders):
    ended = run("bench", "comm", "--json")
    assert orders == [Order()]
    assert json.loads(ended.out) == {
        "rows": [
            {
                "backend": "shm",
                "op": "all_reduce",
                "bytes": 4096,
                "ranks": 2,
                "median_us": 3.25,
                "p90_us": 4.5,
                "gbytes_per_s": 1.26,
            }
        ]
    }


def test_people_get_a_table(run, orders):
    out = run("bench", "comm").out
    for text in ("all_reduce", "4.1 kB", "shm", "3.2 µs", "4.5 µs", "1.26"):
        assert text in out


def test_wrong_numbers_and_names_are_wrong_usage(run):
    for arguments in (["--sizes", "4k"], ["--backends", "pigeon"], ["--ranks", "1"]):
        ended = run("bench", "comm", *arguments)
        assert ended.status == 2
        assert not ended.out


def _ceiling(options, path, threads):
    cost = Cost(1000, 100, unread_parameters=0, pair_flops=10, window=None)
    return Ceiling(cost, {number: Roof(number, 25e9, 1e11) for number in threads})


@pytest.fixture
def toys(monkeypatch):
    """Engines are tables; what they are opened with is kept."""
    found = Toys({size: table() for size in (1, 2, 4)})
    monkeypatch.setattr(
        "shoal.bench.subject.load_subject", lambda options: (Subject(ToyTokenizer(), 4096), Path("folder"))
    )
    monkeypatch.setattr("shoal.bench.subject.load_ceiling", _ceiling)
    monkeypatch.setattr("shoal.bench.offline.measure", lambda order, subject: measure(order, subject, found))
    return found


def test_offline_prints_a_row_a_workload_with_the_sources_ratio_and_the_verdict(run, toys):
    ended = run("bench", "offline", "toy", "--repeats", "1")
    assert ended.status == 0
    for text in ("1.92", "1.77", "1.21", "0 of 4 answers differ", "mean log-likelihood +0.0e+00"):
        assert text in ended.out
    assert ended.err.count("coherent") == 13


def test_offline_prints_one_json_document_with_command_and_machine(run, toys):
    ended = run("bench", "offline", "toy", "--workload", "few_blocks", "--repeats", "1", "--json")
    document = json.loads(ended.out)
    assert document["machine"]["cores"] >= 1
    assert document["command"][0] == "shoal"
    assert (document["model"], document["scale"], document["repeats"]) == ("toy", "ci", 1)
    assert [row["workload"] for row in document["rows"]] == ["few_blocks"]
    assert [(s["name"], s["options"]["tensor_parallel_size"]) for s in document["settings"]] == [
        ("-tp 1", 1),
        ("-tp 2", 2),
    ]


def test_what_is_not_the_same_computation_ends_with_status_1(run, toys):
    toys.tables[2] = table(1)
    ended = run("bench", "offline", "toy", "--workload", "few_blocks,rollouts_1024", "--repeats", "1")
    assert ended.status == 1
    assert "INCOHERENT" in ended.out
    assert "error: not the same computation: few_blocks, rollouts_1024" in ended.err


def test_rows_measured_before_a_failure_are_printed(run, toys):
    toys.most = 2  # the second row's options are its own, and so are its engines
    workloads = "few_blocks,gsm8k_no_fast_decode"
    ended = run("bench", "offline", "toy", "--workload", workloads, "--repeats", "1", "--json")
    assert ended.status == 1
    assert [row["workload"] for row in json.loads(ended.out)["rows"]] == ["few_blocks"]
    assert "error: a rank died" in ended.err


def test_threads_are_per_rank_or_dealt_out_of_a_total(run, toys):
    run("bench", "offline", "toy", "--workload", "few_blocks", "-tp", "1,2,4", "--total-threads", "4")
    assert [(c.tensor_parallel_size, c.num_threads) for c in toys.opened] == [(1, 4), (2, 2), (4, 1)]
    toys.opened.clear()
    run("bench", "tp", "toy", "--workload", "few_blocks", "-tp", "1,2", "--num-threads", "3", "--scale", "ci")
    assert [(c.tensor_parallel_size, c.num_threads) for c in toys.opened] == [(1, 3), (2, 3)]


def test_engine_options_reach_every_engine_and_kernels_are_measured_each(run, toys):
    run(
        "bench", "offline", "toy", "--workload", "rollouts_1024", "-tp", "1", "--repeats", "1",
        "--attn-implementation", "sdpa,eager", "--dtype", "float32", "--block-size", "8",
    )  # fmt: skip
    assert [c.attn_implementation for c in toys.opened] == ["sdpa", "eager"]
    assert {(c.model, c.dtype, c.block_size) for c in toys.opened} == {("toy", "float32", 8)}


def test_offline_tells_the_share_of_the_machine_where_prompts_share_nothing(run, toys):
    arguments = ["toy", "--workload", "few_blocks,one_request", "-tp", "1,2", "--num-threads", "1"]
    document = json.loads(run("bench", "offline", *arguments, "--repeats", "1", "--json").out)
    assert [roof["threads"] for roof in document["roofs"]] == [1, 2]
    shared, alone = ([entry["share_of_machine"] for entry in row["entries"]] for row in document["rows"])
    assert shared == [None, None]
    for share in alone:
        assert share["compute"] > 0 and share["first_token_compute"] > 0
    out = run("bench", "offline", *arguments, "--repeats", "1").out
    assert "of the machine's arithmetic" in out
    assert "the machine, 2 threads: reads 25.0 GB/s, computes 100 GFLOP/s in float32" in out


def test_context_tells_what_further_keys_and_values_cost(run, toys, monkeypatch, tmp_path):
    asked = []

    def measured(order, cost):
        asked.append((order.options["tensor_parallel_size"], order.fitting(), order.tokens, order.repeats))
        yield ContextPoint(100, 12.0, 1e6, 5e6, 0.4, (12.0,))
        yield ContextPoint(200, 14.0, 2e6, 6e6, 0.4, (14.0,))

    monkeypatch.setattr("shoal.bench.context.measure_context", measured)
    arguments = ["toy", "-tp", "2", "--lengths", "200,100,5000", "--tokens", "4", "--repeats", "2"]
    document = json.loads(run("bench", "context", *arguments, "--json").out)
    assert asked == [(2, [100, 200], 4, 2)]
    assert [row["context"] for row in document["rows"]] == [100, 200]
    assert document["growth"]["kv_gbytes_per_s"] == pytest.approx(0.5)
    out = run("bench", "context", *arguments).out
    assert "10.00 ms, and 2000.00 ms for each GB of keys and values: 0.5 GB/s, 2% of" in out
    run("bench", "context", *arguments, "--chart", str(tmp_path / "a.svg"))
    assert "what the machine reads: 25.0 GB/s" in (tmp_path / "a.svg").read_text()


def test_tp_tells_speed_up_and_efficiency(run, toys):
    ended = run("bench", "tp", "toy", "--repeats", "1", "--scale", "ci", "--json")
    lines = json.loads(ended.out)["rows"]
    assert [(line["workload"], line["ranks"]) for line in lines] == [
        ("mixed_32", 1), ("mixed_32", 2), ("one_request", 1), ("one_request", 2),
    ]  # fmt: skip
    out = run("bench", "tp", "toy", "--repeats", "1", "--scale", "ci").out
    assert "efficiency" in out
    assert "one_request, 2 ranks: first token after" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload", "gsm9k"],
        ["--scale", "2"],
        ["-tp", "one"],
        ["-tp", "0"],
        ["-tp", "1,1"],
        ["--total-threads", "1"],
        ["--total-threads", "4", "--num-threads", "2"],
        ["--compare", "sglang"],
        ["--plot", "chart.pdf"],
        ["--repeats", "0"],
    ],
)
def test_an_offline_order_that_makes_no_sense_is_wrong_usage(run, toys, arguments):
    ended = run("bench", "offline", "toy", *arguments)
    assert ended.status == 2
    assert not ended.out
    assert not toys.opened


@pytest.fixture
def loads(monkeypatch):
    """What would have been sent to a server; every load gets two answers."""
    seen = []

    def measure_online(order):
        seen.append(order)
        samples = [Sample((0.1, 0.2), 0.3, 4), Sample((0.6, 0.7), 0.8, 4)]
        return summarise(samples, 2.0, order.targets)

    monkeypatch.setattr("shoal.bench.online.measure_online", measure_online)
    return seen


def test_every_option_of_a_load_reaches_it(run, loads):
    ended = run(
        "bench", "serve", "--url", "http://a", "--num-prompts", "200", "--request-rate", "inf", "--seed", "3",
        "--max-tokens", "7", "--endpoint", "chat", "--served-model-name", "m", "--api-key", "k",
        "--ignore-eos", "--goodput", "ttft:500", "itl:100",
    )  # fmt: skip
    assert ended.status == 0
    (order,) = loads
    assert (order.url, order.request_rate, order.concurrency, order.seed) == ("http://a", math.inf, None, 3)
    assert (order.max_tokens, order.endpoint, order.model, order.api_key) == (7, "chat", "m", "k")
    assert order.ignore_eos
    assert order.targets == (Target("ttft", 500.0), Target("itl", 100.0))
    assert len(set(order.prompts)) == 200, "no two prompts are equal"
    assert "1 met every target: goodput 0.50 requests/s" in ended.out
    assert "2 of 2 requests in 2.00 s: 1.00 requests/s, 4.0 tokens/s" in ended.out


def test_a_load_is_json_too(run, loads):
    document = json.loads(run("bench", "serve", "--url", "http://a", "--json").out)
    assert document["summary"]["ttft_ms"]["p99"] == pytest.approx(600)


def test_a_server_is_named_or_started_and_not_both(run, loads):
    for arguments in ([], ["--url", "http://a", "--model", "demo"], ["--url", "http://a", "ttft:5"]):
        ended = run("bench", "serve", *arguments)
        assert ended.status == 2
    assert not loads


def test_a_model_is_served_for_the_time_with_the_engines_options(run, loads, monkeypatch):
    from contextlib import contextmanager

    started = []

    @contextmanager
    def serving(model, arguments):
        started.append((model, arguments))
        yield "http://started"

    monkeypatch.setattr("shoal.bench.server_process.serving", serving)
    run("bench", "serve", "--model", "demo", "-tp", "2", "--no-enable-prefix-caching")
    assert started == [("demo", ["--tensor-parallel-size", "2", "--no-enable-prefix-caching"])]
    assert loads[0].url == "http://started"
