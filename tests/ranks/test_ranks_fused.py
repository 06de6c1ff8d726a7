"""Fused layers on ranks that are processes: sums go through shared memory within one call a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.messages import AllocateKV, RankReport
from shoal.worker.executor import Executor, ProcessExecutor
from support import families
from support.loads import execute, make_load, make_step
from support.threads import ThreadExecutor

PAGES = AllocateKV(num_blocks=32, block_size=4)
PROMPTS = families.prompts(2, 20, seed=8)


def ignore(done: float, total: float) -> None:
    """Progress nobody looks at."""


def run(executor: Executor) -> tuple[list[RankReport], list[list[int]]]:
    """What the ranks report, and the ids that two prompts go on with, step by step."""
    out = []
    tokens: Sequence[Sequence[int]] = PROMPTS
    starts = [0, 0]
    try:
        reports = executor.load(ignore)
        executor.allocate(PAGES)
        for number in range(6):
            result = execute(executor, make_step(number, *zip(starts, tokens, strict=True)))
            ordered = sorted(result.tokens, key=lambda token: token.sequence_id)
            assert [token.error for token in ordered] == [None, None]
            out.append([token.token_id for token in ordered])
            starts = [start + len(ids) for start, ids in zip(starts, tokens, strict=True)]
            tokens = [[token.token_id] for token in ordered]
    finally:
        executor.shutdown()
    return reports, out


@pytest.mark.parametrize("family", ["llama_9_3", "gpt_neox"])
def test_two_processes_are_fused_and_give_what_torch_alone_gives(family: str, families_path: Path) -> None:
    folder = families.save(family, families_path)
    plain, expected = run(ThreadExecutor(make_load(folder, 2, cpu_kernels="off")))
    assert not any("fused" in note for report in plain for note in report.notes)
    for comm in ("shm", "gloo"):
        reports, got = run(ProcessExecutor(make_load(folder, 2, comm=comm)))
        assert got == expected
        for report in reports:
            assert "2 of 2 layers fused, 1 call(s) a step" in report.notes
            assert report.notes[-1] == "served the fused way"


def test_two_processes_hold_rounded_weights_in_a_third_of_the_bytes(families_path: Path) -> None:
    folder = families.save("llama_9_3", families_path)
    whole, _ = run(ThreadExecutor(make_load(folder, 2)))
    reports, _ = run(ProcessExecutor(make_load(folder, 2, quantization="int8")))
    for report, plain in zip(reports, whole, strict=True):
        assert report.weight_bytes < 0.4 * plain.weight_bytes
        assert any(note.startswith("logits differ by") for note in report.notes)
