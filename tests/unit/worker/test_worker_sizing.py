"""KV pages get what may be used, less what is used, less a worst-case step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal.worker.sizing as module
from shoal.config import make_config
from shoal.device.memory import MemoryReport
from shoal.worker.sizing import kv_budget, step_cost

GB = 1 << 30


class FakeDevice:
    torch_device = torch.device("cpu")

    def __init__(self, kind: str, total: int, free: int) -> None:
        self.kind = kind
        self._memory = MemoryReport(total=total, allocated=0, reserved=0, free=free)

    def memory(self) -> MemoryReport:
        return self._memory

    def synchronize(self) -> None:
        """Nothing runs."""


def budget(device: FakeDevice, ranks: int = 1, growth: int = 0, **options: Any) -> int:
    return kv_budget(make_config(model="m", **options), device, ranks, growth)  # type: ignore[arg-type]


def test_bytes_asked_for_are_given_as_they_are() -> None:
    assert budget(FakeDevice("cpu", GB, 0), kv_cache_memory_bytes=123) == 123


def test_on_a_cpu_pages_are_modest_unless_a_share_is_asked_for() -> None:
    assert budget(FakeDevice("cpu", 64 * GB, 60 * GB)) == 4 * GB
    assert budget(FakeDevice("cpu", 64 * GB, 60 * GB), ranks=2) == 2 * GB
    assert budget(FakeDevice("cpu", 8 * GB, 4 * GB)) == GB
    assert budget(FakeDevice("cpu", 8 * GB, 4 * GB), growth=2 * GB) == GB // 2


def test_on_a_cpu_a_share_is_of_all_memory_and_counts_what_the_rank_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "process_private_bytes", lambda: 3 * GB)
    device = FakeDevice("cpu", 40 * GB, 36 * GB)
    assert budget(device, ranks=2, gpu_memory_utilization=0.5, growth=GB) == (10 - 3 - 1) * GB
    assert budget(FakeDevice("cpu", 40 * GB, 4 * GB), gpu_memory_utilization=0.5) == 4 * GB, (
        "no more than free"
    )


def test_an_accelerator_keeps_a_tenth_free_and_counts_what_others_hold() -> None:
    device = FakeDevice("cuda", 100 * GB, 70 * GB)
    assert budget(device, growth=10 * GB) == (90 - 30 - 10) * GB
    assert budget(device, gpu_memory_utilization=0.5, growth=GB) == (50 - 30 - 1) * GB


def test_where_there_is_no_room_the_budget_is_nothing() -> None:
    assert budget(FakeDevice("cpu", GB, GB // 2), growth=GB) == 0
    assert budget(FakeDevice("cuda", 10 * GB, GB)) == 0


@pytest.mark.parametrize(
    ("batched", "length", "probed", "times"),
    [(2048, 4096, 256, 8), (1, 4096, 1, 1), (100, 30, 30, 4), (300, 256, 256, 2)],
)
def test_a_step_is_measured_small_and_scaled_up(
    batched: int, length: int, probed: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Model:
        def plain(self, ids: torch.Tensor, wanted: torch.Tensor) -> None:
            assert int(ids.max()) < 11 and wanted.tolist() == [len(ids) - 1]
            seen.append(len(ids))

    monkeypatch.setattr(module, "reset_peak", lambda kind: 0)
    monkeypatch.setattr(module, "used_since", lambda kind, before: 1000)
    config = make_config(model="m", max_num_batched_tokens=batched, max_num_seqs=64)
    cost = step_cost(Model(), config, FakeDevice("cpu", GB, GB), 11, length)  # type: ignore[arg-type]
    assert seen == [probed]
    assert cost.growth_bytes == 1000 * times + 5 * 4 * min(64, batched) * 11
