"""Ranks are lost while requests run, and nobody's answer is."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from chaos.kill import moments_of, run, tiny
from chaos.kill_matrix import SHORT, WHOLE
from shoal import LLM, SamplingParams
from shoal.worker.faults import VARIABLE
from support import families

pytestmark = pytest.mark.slow

SMALL = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "64000000")


@pytest.mark.demo
def test_streams_of_the_demo_survive_the_loss_of_ranks() -> None:
    """One loss in the middle, and one more while the ranks are started."""
    report = run(
        "demo",
        2,
        "kill",
        ["recovery"],
        seed=17,
        streams=8,
        most_tokens=40,
        step_timeout_s=30,
        options=SMALL,
    )
    print("\n".join(report.lines()))
    assert not report.wrong(), report


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("way", "tp", "moments"),
    [
        ("kill", 3, ["idle", "prefill"]),
        ("stop", 2, ["idle", "decode"]),
        ("raise", 2, ["prefill", "decode"]),
        ("hang", 2, ["decode"]),
    ],
)
def test_whatever_befalls_ranks_streams_end_as_if_it_had_not(
    way: str, tp: int, moments: list[str], tmp_path: Path
) -> None:
    """Times are for an idle machine to judge (``chaos.kill_matrix``), and so is which moment was met: a tiny
    model's prompts are over in milliseconds.
    """
    report = run(**tiny(tmp_path), tp=tp, way=way, moments=moments, seed=23, step_timeout_s=6)
    print("\n".join(report.lines()))
    assert not report.wrong(), report


@pytest.mark.demo
@pytest.mark.full
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    ("way", "tp", "rounds"), [(*cell, 20) for cell in WHOLE] + [(*cell, 5) for cell in SHORT]
)
def test_streams_of_a_server_survive_whatever_befalls_ranks(way: str, tp: int, rounds: int) -> None:
    seed = random.SystemRandom().randrange(1 << 16)
    print(f"seed {seed}")
    moments = moments_of(rounds, random.Random(seed))
    report = run("demo", tp, way, moments, seed=seed, servers=min(2, rounds // 5))
    print("\n".join(report.lines()))
    assert not report.failures(), report


@pytest.fixture(scope="module")
def folder(families_path: Path) -> Path:
    return families.save("llama_9_3", families_path)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, 96) for _ in range(rng.randint(2, 60))] for _ in range(count)]


def params(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=4 + i % 9, temperature=i % 2, seed=i, ignore_eos=True) for i in range(count)
    ]


def ids(outputs: object) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]  # type: ignore[attr-defined]


@pytest.fixture
def two_ranks(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), tensor_parallel_size=2, num_threads=1, kv_cache_memory_bytes=1 << 20) as llm:
        yield llm


def test_a_call_with_200_prompts_is_complete_and_right_though_ranks_were_killed(two_ranks: LLM) -> None:
    expected = ids(two_ranks.generate(prompts(200), params(200)))

    def kill(num_finished: int) -> None:
        if num_finished == 50:
            ranks = [c for c in psutil.Process().children() if "shoal.worker" in " ".join(c.cmdline())]
            os.kill(ranks[-1].pid, signal.SIGKILL)

    assert ids(two_ranks.generate(prompts(200), params(200), kill)) == expected
    stats = two_ranks.stats()
    assert stats.restarts_total == 1 and stats.replays_total >= 1
    assert stats.requests_total == {"length": 400}
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert two_ranks._core is not None
    two_ranks._core.check_integrity()


def test_a_rank_in_this_process_that_raises_is_built_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(folder), num_threads=1, kv_cache_memory_bytes=1 << 20) as llm:
        expected = ids(llm.generate(prompts(20), params(20)))
    monkeypatch.setenv(VARIABLE, "raise@0:3,memory@0:6")
    with LLM(str(folder), num_threads=1, kv_cache_memory_bytes=1 << 20) as llm:
        assert ids(llm.generate(prompts(20), params(20))) == expected
        assert llm.stats().restarts_total == 2


def test_the_request_that_a_rank_does_not_survive_is_failed_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "raise@0:token=99")
    given = [*prompts(6), [5, 99, 6]]
    with LLM(str(folder), num_threads=1, kv_cache_memory_bytes=1 << 20) as llm:
        greedy = SamplingParams(max_tokens=3, temperature=0, logit_bias={99: -100}, ignore_eos=True)
        *good, bad = llm.generate(given, greedy)
    assert [branch.finish_reason for output in good for branch in output.outputs] == ["length"] * 6
    assert bad.outputs[0].finish_reason == "error" and "SHOAL_FAULT" in (bad.outputs[0].error or "")
    assert f"request {bad.request_id} is failed" in caplog.text
