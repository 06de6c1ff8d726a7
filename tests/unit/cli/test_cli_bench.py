"""``shoal bench`` measures what it is asked to, and prints a table or JSON."""

from __future__ import annotations

import json

import pytest

from shoal.bench.comm import Order, Row


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
