"""Choosing device, ranks and dtype from what a user asks for."""

from __future__ import annotations

import logging
import types

import pytest
import torch

from shoal.device import base
from shoal.device.base import available_devices, check_ranks, memory, resolve_device, resolve_dtype
from shoal.device.cpu import CpuDevice
from shoal.device.cuda import AcceleratorDevice
from shoal.device.memory import MemoryReport
from shoal.device.mps import MpsDevice
from shoal.errors import ConfigError


def hardware(
    monkeypatch: pytest.MonkeyPatch, cuda: int = 0, mps: bool = False, xpu: int = 0, bfloat16: bool = True
) -> None:
    """Pretend that this machine has these devices."""
    for kind, count in (("cuda", cuda), ("xpu", xpu)):
        stub = types.SimpleNamespace(
            is_available=lambda count=count: count > 0,
            device_count=lambda count=count: count,
            get_device_capability=lambda index: (9, 0) if bfloat16 else (7, 0),
        )
        monkeypatch.setattr(torch, kind, stub)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: bfloat16)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(2, True, "cuda:0"), (0, True, "mps"), (0, False, "cpu")],
)
def test_auto_is_cuda_then_mps_then_the_cpu(
    monkeypatch: pytest.MonkeyPatch, cuda: int, mps: bool, expected: str
) -> None:
    hardware(monkeypatch, cuda=cuda, mps=mps)
    assert resolve_device("auto").name == expected


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("cpu", "cpu"), ("CPU", "cpu"), ("cpu:0", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"),
        ("mps", "mps"), ("mps:0", "mps"), ("xpu", "xpu:0"),
    ],
)  # fmt: skip
def test_names_are_taken_with_and_without_an_index(
    monkeypatch: pytest.MonkeyPatch, requested: str, expected: str
) -> None:
    hardware(monkeypatch, cuda=2, mps=True, xpu=1)
    assert resolve_device(requested).name == expected


@pytest.mark.parametrize("requested", ["cuda:2", "mps:1", "xpu", "cpu:1"])
def test_a_device_that_is_not_there_is_refused_with_a_list_of_what_is(
    monkeypatch: pytest.MonkeyPatch, requested: str
) -> None:
    hardware(monkeypatch, cuda=2, mps=True)
    with pytest.raises(ConfigError, match="no such device here") as caught:
        resolve_device(requested)
    assert caught.value.field == "device"
    assert "cpu, cuda:0, cuda:1, mps" in str(caught.value)


@pytest.mark.parametrize("requested", ["gpu", "", "cuda:x", "cuda:-1", "auto:1", "0", "cudaa"])
def test_a_name_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, requested: str) -> None:
    hardware(monkeypatch, cuda=2)
    with pytest.raises(ConfigError) as caught:
        resolve_device(requested)
    assert caught.value.field == "device"


def test_available_devices_are_listed_with_the_cpu_first(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware(monkeypatch, cuda=1, xpu=1, mps=True)
    assert available_devices() == ["cpu", "cuda:0", "xpu:0", "mps"]


def test_memory_is_the_devices_own_report() -> None:
    assert memory(CpuDevice()).total > 0


def test_two_ranks_on_mps_are_refused() -> None:
    check_ranks(MpsDevice(), 1)
    with pytest.raises(ConfigError, match="one such device") as caught:
        check_ranks(MpsDevice(), 2)
    assert caught.value.field == "tensor_parallel_size"


def test_cuda_takes_at_most_as_many_ranks_as_devices_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware(monkeypatch, cuda=4)
    check_ranks(AcceleratorDevice("cuda"), 4)
    with pytest.raises(ConfigError, match="4 visible"):
        check_ranks(AcceleratorDevice("cuda"), 5)
    with pytest.raises(ConfigError, match="starts at cuda:2; pass at most 2"):
        check_ranks(AcceleratorDevice("cuda", 2), 3)


def test_more_ranks_than_cores_on_a_cpu_are_allowed_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "usable_cores", lambda: 2)
    with caplog.at_level(logging.WARNING):
        check_ranks(CpuDevice(), 2)
        assert caplog.records == []
        check_ranks(CpuDevice(), 4)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "4 ranks share 2 CPU cores" in caplog.text


@pytest.mark.parametrize(
    ("model", "instructions", "expected"),
    [
        ("bfloat16", None, "float32"),
        ("bfloat16", "avx512_bf16", "bfloat16"),
        ("bfloat16", "amx_bf16", "bfloat16"),
        ("float32", "amx_bf16", "float32"),
        ("float16", "amx_bf16", "float32"),
        (None, "amx_bf16", "float32"),
    ],
)
def test_auto_on_a_cpu_is_float32_unless_bfloat16_is_fast(
    monkeypatch: pytest.MonkeyPatch, model: str | None, instructions: str | None, expected: str
) -> None:
    monkeypatch.setattr(base, "bfloat16_instructions", lambda: instructions)
    choice = resolve_dtype("auto", CpuDevice(), model)
    assert choice.name == expected
    assert choice.reason.startswith(f"{expected}: ")


@pytest.mark.parametrize(
    ("model", "bfloat16", "expected"),
    [
        (torch.bfloat16, True, "bfloat16"),
        (torch.bfloat16, False, "float16"),
        (torch.float16, True, "float16"),
        (torch.float32, True, "bfloat16"),
        (torch.float32, False, "float16"),
        (None, True, "bfloat16"),
        (torch.float64, True, "float32"),
    ],
)
def test_auto_on_cuda_is_the_models_own_dtype_and_halves_float32(
    monkeypatch: pytest.MonkeyPatch, model: torch.dtype | None, bfloat16: bool, expected: str
) -> None:
    hardware(monkeypatch, cuda=1, bfloat16=bfloat16)
    assert resolve_dtype("auto", AcceleratorDevice("cuda"), model).name == expected


@pytest.mark.parametrize(
    ("model", "bfloat16", "expected"),
    [("float32", True, "float32"), ("bfloat16", True, "bfloat16"), ("bfloat16", False, "float16")],
)
def test_auto_on_mps_is_the_models_own_dtype(
    monkeypatch: pytest.MonkeyPatch, model: str, bfloat16: bool, expected: str
) -> None:
    hardware(monkeypatch, mps=True, bfloat16=bfloat16)
    assert resolve_dtype("auto", MpsDevice(), model).name == expected


def test_an_explicit_dtype_is_taken_as_it_is_and_slow_ones_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "bfloat16_instructions", lambda: None)
    assert resolve_dtype("float32", CpuDevice(), "bfloat16").name == "float32"
    choice = resolve_dtype("bfloat16", CpuDevice(), "float32")
    assert choice.name == "bfloat16"
    assert "float32 is faster" in choice.reason


def test_an_explicit_dtype_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware(monkeypatch, cuda=1, bfloat16=False)
    with pytest.raises(ConfigError) as caught:
        resolve_dtype("bfloat16", AcceleratorDevice("cuda"))
    assert caught.value.field == "dtype"


def test_more_cpu_ranks_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    report = MemoryReport(total=8 << 30, allocated=0, reserved=0, free=1 << 30)
    monkeypatch.setattr(CpuDevice, "memory", lambda self: report)
    with pytest.raises(ConfigError, match=r"3 ranks do not fit on cpu.*at most 2") as caught:
        check_ranks(CpuDevice(), 3)
    assert caught.value.field == "tensor_parallel_size"
    check_ranks(CpuDevice(), 2)
