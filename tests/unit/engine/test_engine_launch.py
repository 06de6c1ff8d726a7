"""Engines start at the edges of their options, say what does not fit, and leave nothing when they fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import shoal.engine.launch as module
from shoal.config import make_config
from shoal.device.base import Device
from shoal.engine.capacity import capacity_of
from shoal.engine.launch import launch
from shoal.engine.llm import LLM
from shoal.errors import ConfigError, RankError, RequestError, UsageError
from shoal.messages import AllocateKV, RankReady, RankReport
from shoal.sampling_params import SamplingParams
from shoal.worker.executor import Executor
from support import families

PROMPTS = families.prompts(4, 12, seed=2)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def engine(folder: Path, family: str, **options: Any) -> LLM:
    return LLM(str(families.save(family, folder)), **{"kv_cache_memory_bytes": 1 << 20, **options})


def tokens(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 3, "block_size": 1},
        {"max_num_batched_tokens": 5, "block_size": 4, "num_gpu_blocks_override": 5},
        {"block_size": 1024, "max_model_len": 20},
        {"block_size": 64, "num_gpu_blocks_override": 1},
        {"max_model_len": 18},
        {"kv_cache_memory_bytes": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama_9_3", "bloom"])
def test_the_same_tokens_at_every_edge(family: str, options: dict[str, Any], families_path: Path) -> None:
    """The paged and the padded way, cut as finely and kept as tightly as can be."""
    model = families.build(family)
    expected = [families.reference(model, prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]
    with engine(families_path, family, **options) as llm:
        assert tokens(llm) == expected


def test_the_cache_bounds_the_length_and_says_so(
    families_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(families_path, "llama_9_3", num_gpu_blocks_override=1, block_size=8) as llm:
        assert llm.info.max_model_len == 8
        with pytest.raises(RequestError, match="max_model_len"):
            llm.generate([[5] * 8], GREEDY)
        assert len(tokens(llm, [[5, 6, 7, 8]])[0]) == 4
    assert "max_model_len is 8, not 256" in caplog.text


def test_more_length_than_the_model_was_made_for_is_refused(families_path: Path) -> None:
    with pytest.raises(ConfigError, match="257 is more than the model was made for") as caught:
        engine(families_path, "llama_9_3", max_model_len=257)
    assert caught.value.field == "max_model_len"


def report(rank: int, per_token: int, budget: int, **further: Any) -> RankReport:
    return RankReport(
        rank=rank,
        weight_bytes=0,
        bytes_read=0,
        load_s=0,
        kv_bytes_per_token=per_token,
        kv_budget_bytes=budget,
        **further,
    )


def blocks(*reports: RankReport, **options: Any) -> int:
    config = make_config(model="m", block_size=10, max_num_seqs=4, **options)
    return capacity_of(config, reports, length=95).num_blocks


def test_the_poorest_rank_counts_and_no_more_is_taken_than_can_be_used() -> None:
    assert blocks(report(0, 8, 800), report(1, 4, 80)) == 2
    assert blocks(report(0, 8, 1 << 30)) == 4 * 10
    assert blocks(report(0, 8, 0), num_gpu_blocks_override=7) == 7


def test_a_rank_without_kv_heads_bounds_nothing() -> None:
    assert blocks(report(0, 8, 240), report(1, 0, 0)) == 3
    assert blocks(report(0, 0, 0)) == 40


def test_too_little_memory_is_refused_with_the_rank_and_the_figures() -> None:
    with pytest.raises(ConfigError, match="rank 1 has 39 bytes for KV pages, a block takes 40"):
        blocks(report(0, 8, 800), report(1, 4, 39))


def test_states_get_what_they_need_and_at_most_half_of_what_keys_and_values_share() -> None:
    config = make_config(model="m", block_size=10, max_num_seqs=4)
    ample = capacity_of(config, [report(0, 8, 1 << 20, state_bytes=100, way="state")], 95)
    assert (ample.num_slots, ample.num_blocks) == (4, 40)
    tight = capacity_of(config, [report(0, 8, 500, state_bytes=100, way="state")], 95)
    assert (tight.num_slots, tight.num_blocks, tight.max_model_len) == (2, 3, 30)
    alone = capacity_of(config, [report(0, 0, 350, state_bytes=100, way="state")], 95)
    assert (alone.num_slots, alone.max_model_len) == (3, 95)
    with pytest.raises(ConfigError, match="too few for the 100 that one sequence's state takes"):
        capacity_of(config, [report(0, 0, 99, state_bytes=100, way="state")], 95)


def shared(full: int, windowed: int, budget: int, **options: Any) -> tuple[int, int]:
    """Blocks of 10 tokens, of layers that keep all and of those that see 20 positions."""
    given: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 10,
        "enable_prefix_caching": False,
        **options,
    }
    config = make_config(model="m", block_size=10, **given)
    window = {"window": 20, "window_bytes_per_token": windowed}
    fits = capacity_of(
        config, [report(0, full + windowed, budget, **window)], given.get("max_model_len", 1000)
    )
    assert fits.window is not None and fits.window.window == 20
    used = 10 * (full * fits.num_blocks + windowed * fits.window.num_blocks)
    assert used <= budget or "num_gpu_blocks_override" in options
    return fits.num_blocks, fits.window.num_blocks


def test_windows_get_what_they_need_and_the_rest_holds_more_blocks() -> None:
    """Four sequences of three blocks and two steps of one block: 14, where without windows all had 150."""
    assert shared(full=1, windowed=5, budget=9000) == (400, 14)
    assert shared(full=1, windowed=5, budget=3000) == (230, 14)
    assert shared(full=1, windowed=5, budget=3000, enable_prefix_caching=True) == (170, 26)


def test_scarce_memory_goes_half_to_windows_unless_the_longest_sequence_needs_it() -> None:
    assert shared(full=1, windowed=5, budget=1200, max_model_len=500) == (60, 12)
    assert shared(full=5, windowed=1, budget=3000, max_num_seqs=100, max_model_len=400) == (50, 50)
    assert shared(full=1, windowed=5, budget=1200) == (95, 5), "down to one sequence's three and two steps"
    assert shared(full=1, windowed=5, budget=300) == (5, 5), "too few for a window: none gives one back"


def test_where_all_layers_see_a_window_a_sequence_may_be_longer_than_the_cache() -> None:
    assert shared(full=0, windowed=5, budget=600) == (400, 12)
    assert shared(full=0, windowed=5, budget=100) == (2, 2)
    assert shared(full=1, windowed=5, budget=0, num_gpu_blocks_override=9) == (9, 9)
    assert shared(full=1, windowed=5, budget=0, num_gpu_blocks_override=90) == (90, 14)


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    config = make_config(model="m", block_size=10)
    kept = report(0, 6, 600, window=95, window_bytes_per_token=3)
    assert capacity_of(config, [kept], 95).window is None


def test_where_nothing_is_kept_a_step_holds_the_longest_sequence(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(model="m", max_num_batched_tokens=64)
    fits = capacity_of(config, [report(0, 0, 0, way="recompute")], 95)
    assert (fits.keeps_kv, fits.max_num_batched_tokens) == (False, 95)
    assert "max_num_batched_tokens is 95, not 64" in caplog.text


class FailingExecutor:
    """Fails in ``stage``; counts its shutdowns."""

    def __init__(self, stage: str, error: Exception) -> None:
        self.stage, self.error = stage, error
        self.num_shutdowns = 0

    def load(self, progress: object) -> list[RankReport]:
        if self.stage == "load":
            raise self.error
        return [report(0, 8, 1 << 20)]

    def allocate(self, message: AllocateKV) -> list[RankReady]:
        if self.stage == "allocate":
            raise self.error
        return [RankReady(rank=0, kv_bytes=0)]

    def shutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.mark.parametrize("stage", ["load", "allocate", "afterwards"])
def test_a_failing_start_stops_the_ranks(
    stage: str, families_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = FailingExecutor(stage, RankError("rank 0 was killed by signal 9", 0))
    monkeypatch.setattr(module, "_executor", lambda *_: executor)

    def fail(*_: object) -> None:
        raise executor.error

    if stage == "afterwards":
        monkeypatch.setattr(module, "_announce", fail)
    config = make_config(model=str(families.save("llama_9_3", families_path)))
    with pytest.raises(RankError, match="signal 9"):
        launch(config)
    assert executor.num_shutdowns == 1


def test_pages_that_do_not_fit_the_machine_are_an_error_of_the_rank(families_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0: making 100000000000 KV blocks"):
        engine(families_path, "llama_9_3", num_gpu_blocks_override=10**11)


@pytest.mark.parametrize(
    ("options", "device", "computes_apart", "is_ahead"),
    [
        ({"num_threads": 1}, "cpu", True, True),
        ({"num_threads": 2}, "cpu", True, False),
        ({"num_threads": 2}, "cuda", True, True),
        ({"num_threads": 2, "async_scheduling": True}, "cpu", True, True),
        ({"num_threads": 1, "async_scheduling": False}, "cpu", True, False),
        ({"num_threads": 1, "async_scheduling": True}, "cuda", False, False),
    ],
)
def test_steps_are_handed_out_ahead_where_that_is_asked_for_or_a_core_is_free(
    options: dict[str, Any],
    device: str,
    computes_apart: bool,
    is_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks on four cores; never where the rank computes on the engine's own thread."""
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    config = make_config(model="m", tensor_parallel_size=2, **options)
    found = module._runs_ahead(
        config,
        cast(Device, SimpleNamespace(kind=device)),
        cast(Executor, SimpleNamespace(computes_apart=computes_apart)),
    )
    assert found == is_ahead


def test_inline_carries_one_rank(families_path: Path) -> None:
    with pytest.raises(UsageError, match="inline carries one rank"):
        engine(families_path, "llama_9_3", executor="inline", tensor_parallel_size=2)
