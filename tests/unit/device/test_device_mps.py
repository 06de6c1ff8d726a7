"""Apple's GPU, against stand-ins for torch's modules."""

from __future__ import annotations

import types

import pytest
import torch

from shoal.device.mps import MpsDevice, mps_is_available


def test_there_is_one_and_every_rank_would_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    stub = types.SimpleNamespace(
        recommended_max_memory=lambda: 100,
        current_allocated_memory=lambda: 10,
        driver_allocated_memory=lambda: 30,
        synchronize=lambda: waited.append(True),
    )
    monkeypatch.setattr(torch, "mps", stub)
    device = MpsDevice()
    device.synchronize()
    assert waited == [True]
    assert (device.name, device.max_ranks, device.visible_count) == ("mps", 1, 1)
    assert device.memory().free == 70
    assert device.for_rank(0) == device
    assert device.torch_device == torch.device("mps")


@pytest.mark.parametrize("new_enough", [True, False])
def test_bfloat16_needs_macos_14(monkeypatch: pytest.MonkeyPatch, new_enough: bool) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: new_enough)
    device = MpsDevice()
    assert device.supports(torch.bfloat16) is new_enough
    assert device.supports(torch.float16)
    assert not device.supports(torch.float64)


def test_availability_is_torchs_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert mps_is_available()
