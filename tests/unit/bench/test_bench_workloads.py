"""Workloads are the source's, in its order; a scale shrinks them and leaves what they are."""

from __future__ import annotations

import pytest

from shoal.bench.workloads import SOURCE, WORKLOADS, Scale, fitted, named
from shoal.config import EngineConfig
from shoal.errors import UsageError


def test_the_sources_rows_stand_in_its_order_with_its_ratios() -> None:
    assert [workload.source_ratio for workload in SOURCE] == [
        1.49, 1.35, 1.50, 1.49, 1.24, 1.92, 1.34, 1.38, 1.43, 1.51, 1.77, 1.21, 1.24,
    ]  # fmt: skip
    assert named(["all"]) == list(SOURCE)
    assert WORKLOADS["one_request"].source_ratio is None


def test_names_keep_their_order_and_unknown_ones_are_refused() -> None:
    assert [w.name for w in named(["few_blocks", "gsm8k_default"])] == ["few_blocks", "gsm8k_default"]
    with pytest.raises(UsageError, match="gsm9k") as caught:
        named(["gsm9k"])
    assert caught.value.field == "workload"


def test_full_changes_nothing() -> None:
    assert [Scale.parse("full").apply(workload) for workload in SOURCE] == list(SOURCE)


def test_a_scale_shrinks_counts_and_lengths_down_to_a_floor() -> None:
    ci = Scale.parse("ci")
    longest, shortest = ci.apply(WORKLOADS["rollouts_16384"]), ci.apply(WORKLOADS["rollouts_1024"])
    assert (longest.count, longest.prompt_tokens, longest.max_tokens) == (4, 16, 512)
    assert shortest.max_tokens == 32
    assert ci.apply(WORKLOADS["gsm8k_default"]).shots == 1
    assert ci.apply(WORKLOADS["one_request"]).count == 1
    assert Scale.parse("0.5").apply(WORKLOADS["few_blocks"]).max_tokens == 128


@pytest.mark.parametrize("text", ["0", "1.5", "-1", "huge", "nan"])
def test_a_scale_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Scale.parse(text)
    assert caught.value.field == "scale"


def test_every_flag_is_an_engine_option() -> None:
    for workload in WORKLOADS.values():
        assert workload.flags.keys() <= EngineConfig.model_fields.keys()


@pytest.mark.parametrize("scale", ["ci", "small", "full"])
def test_few_blocks_hold_one_request_and_not_all(scale: str) -> None:
    workload = Scale.parse(scale).apply(WORKLOADS["few_blocks"])
    blocks = workload.options(16, workload.prompt_tokens)["num_gpu_blocks_override"]
    one = -(-(workload.prompt_tokens + workload.max_tokens) // 16)
    assert one <= blocks < one * workload.count


def test_a_prompts_sampling_is_set_in_full_and_seeded_by_its_place() -> None:
    params = WORKLOADS["multi_return_seq"].params(7)
    assert (params.n, params.temperature, params.seed) == (8, 1.0, 7)
    assert None not in (params.top_p, params.top_k, params.min_p, params.repetition_penalty)
    assert WORKLOADS["gsm8k_sampling"].params(0).top_p == 0.9
    assert not WORKLOADS["ifeval_default"].params(0).ignore_eos


def test_outputs_are_cut_to_the_models_length_and_it_is_said() -> None:
    workload = WORKLOADS["rollouts_1024"]
    assert fitted(workload, 256, 4096) == (workload, None)
    cut, note = fitted(workload, 256, 512)
    assert cut.max_tokens == 256
    assert note is not None and "256 output tokens instead of 1024" in note
    with pytest.raises(UsageError, match="smaller scale"):
        fitted(workload, 256, 256)
