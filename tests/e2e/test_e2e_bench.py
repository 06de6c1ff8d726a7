"""``shoal bench`` on tiny random models: rank counts are compared; a fault between ranks gives status 1."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.engine.launch as launching
from shoal.cli.main import main
from shoal.comm.simulated import SimulatedComm
from shoal.plan.types import Plan
from support import families

pytestmark = pytest.mark.usefixtures("thread_ranks", "logging_restored")

Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], families_path: Path) -> Bench:
    """``bench("offline", workloads)``: the exit status and the JSON that was printed."""
    path = str(families.save("llama", families_path))

    def run(what: str, workloads: str, *further: str) -> tuple[int, dict[str, Any]]:
        status = main(
            [
                "bench", what, path, "--workload", workloads, "--scale", "ci", "-tp", "1,2", "--repeats", "1",
                "--num-threads", "1", "--kv-cache-memory-bytes", str(1 << 22), "--json", *further,
            ]
        )  # fmt: skip
        return status, json.loads(capsys.readouterr().out)

    return run


def test_two_ranks_compute_what_one_does(bench: Bench) -> None:
    status, document = bench("offline", "rollouts_1024,multi_return_seq")
    assert status == 0
    greedy, sampled = document["rows"]
    assert (greedy["source_ratio"], sampled["source_ratio"]) == (1.34, 1.24)
    for row, answers in ((greedy, 4), (sampled, 4 * 8)):
        one, two = row["entries"]
        assert (one["name"], two["name"]) == ("-tp 1", "-tp 2")
        assert two["agreement"]["requests"] == answers
        assert two["agreement"]["differing"] == 0
        assert two["log_likelihood"]["positions"] > 30
        assert two["output_tokens"] == [answers * row["max_tokens"]]
        assert two["tokens_per_s"] > 0


def test_an_all_reduce_that_loses_a_part_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(self: SimulatedComm, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._exchange("all_reduce", (tuple(tensor.shape),), tensor)
        return functools.reduce(torch.add, parts[: max(1, len(parts) - 1)])

    monkeypatch.setattr(SimulatedComm, "all_reduce", losing)
    _assert_found(*bench("offline", "rollouts_1024"))


def test_a_swapped_kv_head_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    as_planned = launching._executor

    def swapped(config: Any, path: Any, plan: Plan) -> Any:
        params = {
            pattern: dataclasses.replace(split, ranges=split.ranges[::-1])
            if pattern.endswith("k_proj.weight") and split.is_split
            else split
            for pattern, split in plan.params.items()
        }
        assert plan.tp == 1 or params != dict(plan.params)
        return as_planned(config, path, dataclasses.replace(plan, params=params))

    monkeypatch.setattr(launching, "_executor", swapped)
    _assert_found(*bench("offline", "rollouts_1024"))


def _assert_found(status: int, document: dict[str, Any]) -> None:
    assert status == 1
    (row,) = document["rows"]
    two = row["entries"][1]
    assert not row["coherent"]
    assert not two["agreement"]["equal"]
    assert not two["log_likelihood"]["equal"]


def test_attention_kernels_are_compared(bench: Bench) -> None:
    status, document = bench("offline", "few_blocks", "--attn-implementation", "sdpa,eager")
    assert status == 0
    (row,) = document["rows"]
    assert [entry["name"] for entry in row["entries"]] == [
        "sdpa -tp 1", "sdpa -tp 2", "eager -tp 1", "eager -tp 2",
    ]  # fmt: skip
    assert all(entry["coherent"] for entry in row["entries"])


def test_scaling_is_told_by_rank_count(bench: Bench) -> None:
    status, document = bench("tp", "few_blocks")
    assert status == 0
    one, two = document["rows"]
    assert (one["ranks"], one["speedup"], one["efficiency"]) == (1, 1.0, 1.0)
    assert (two["ranks"], two["threads_per_rank"]) == (2, 1)
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
