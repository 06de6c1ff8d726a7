"""CUDA and XPU devices, against stand-ins for torch's modules."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from shoal.device.cuda import AcceleratorDevice, accelerator_count
from shoal.device.memory import MemoryReport


def backend(count: int = 2, capability: tuple[int, int] = (9, 0), **more: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_name=lambda index: f"Chip {index}",
        get_device_capability=lambda index: capability,
        mem_get_info=lambda index: (50, 100),
        memory_allocated=lambda index: 10,
        memory_reserved=lambda index: 20,
        **more,
    )


def test_devices_are_counted_only_where_the_kind_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", backend(3))
    monkeypatch.setattr(torch, "xpu", backend(0))
    assert (accelerator_count("cuda"), accelerator_count("xpu")) == (3, 0)


def test_ranks_take_the_devices_from_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", backend(4))
    device = AcceleratorDevice("cuda", 1)
    assert device.max_ranks == 3
    assert device.for_rank(2).name == "cuda:3"
    assert device.torch_device == torch.device("cuda", 1)
    assert device.description() == "Chip 1"
    assert device.memory() == MemoryReport(100, 10, 20, 60)


def test_its_own_index_is_activated_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    stub = backend(
        set_device=lambda index: calls.append(("set", index)),
        synchronize=lambda index: calls.append(("wait", index)),
    )
    monkeypatch.setattr(torch, "xpu", stub)
    device = AcceleratorDevice("xpu", 1)
    device.activate()
    device.synchronize()
    assert calls == [("set", 1), ("wait", 1)]


@pytest.mark.parametrize(("capability", "supported"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_bfloat16_needs_compute_capability_8(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], supported: bool
) -> None:
    monkeypatch.setattr(torch, "cuda", backend(capability=capability))
    device = AcceleratorDevice("cuda")
    assert device.supports(torch.bfloat16) is supported
    assert device.supports(torch.float16)
