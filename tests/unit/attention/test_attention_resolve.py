"""Which kernel is taken, what is refused, and what is said."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path

import pytest
import torch

from shoal.attention.resolve import CPU_PAGED, METAL_FLASH, Candidate, Choice, first_passing, is_mps, resolve
from shoal.device.cpu import CpuDevice
from shoal.device.cuda import AcceleratorDevice
from shoal.device.mps import MpsDevice
from shoal.errors import ConfigError

OPT_OUT = "Pass `--attn-implementation sdpa` to opt out."


def installed(package: str) -> bool:
    return True


def nothing_installed(package: str) -> bool:
    return False


def hardware(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool) -> None:
    stub = types.SimpleNamespace(is_available=lambda: cuda, device_count=lambda: int(cuda))
    monkeypatch.setattr(torch, "cuda", stub)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize("device", ["mps", "mps:0", "MPS", torch.device("mps"), MpsDevice()])
def test_a_device_that_begins_with_mps_is_mps(device: str | torch.device | MpsDevice) -> None:
    assert is_mps(device)


@pytest.mark.parametrize("device", [0, 1, "cpu", "cuda", "cuda:0", CpuDevice(), AcceleratorDevice("cuda")])
def test_an_integer_or_another_device_is_not_mps(
    monkeypatch: pytest.MonkeyPatch, device: int | str | CpuDevice
) -> None:
    hardware(monkeypatch, cuda=False, mps=True)
    assert not is_mps(device)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_auto_is_mps_where_mps_is_there_and_cuda_is_not(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: bool
) -> None:
    hardware(monkeypatch, cuda=cuda, mps=mps)
    assert is_mps("auto") is expected


def test_mps_with_kernels_takes_the_metal_kernel_with_exactly_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        choice = resolve(None, "mps", has_package=installed)
    assert choice.name == METAL_FLASH
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert METAL_FLASH in warnings[0]
    assert warnings[0].endswith(OPT_OUT)


def test_mps_without_kernels_takes_sdpa_and_hints_at_the_package(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice = resolve(None, "mps:0", has_package=nothing_installed)
    assert choice.name == "sdpa"
    assert [name for name, _ in choice.rejected] == [METAL_FLASH]
    assert "`pip install kernels` is faster" in caplog.text
    assert all(record.levelno == logging.INFO for record in caplog.records)


@pytest.mark.parametrize("device", ["cuda", "xpu", 0])
def test_elsewhere_sdpa_is_taken_and_metal_is_not_spoken_of(
    caplog: pytest.LogCaptureFixture, device: str | int
) -> None:
    with caplog.at_level(logging.INFO):
        assert resolve(None, device, has_package=installed).name == "sdpa"
    assert "metal" not in caplog.text
    assert "pip install" not in caplog.text


def test_a_cpu_takes_our_own_kernel_where_its_compiler_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert resolve(None, "cpu", has_package=installed).name == CPU_PAGED
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert resolve(None, "cpu", has_package=nothing_installed).name == "sdpa"
    assert f"not {CPU_PAGED}: the package 'numba' is not installed" in caplog.text
    with pytest.raises(ConfigError, match="pip install numba"):
        resolve(CPU_PAGED, "cpu", has_package=nothing_installed)


@pytest.mark.parametrize(
    ("requested", "device"), [("sdpa", "cpu"), ("eager", "cpu"), ("sdpa", "mps"), (METAL_FLASH, "mps")]
)
def test_an_explicit_request_is_returned_as_it_is_without_a_warning(
    caplog: pytest.LogCaptureFixture, requested: str, device: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert resolve(requested, device, has_package=installed).name == requested
    assert all(record.levelno == logging.INFO for record in caplog.records)


@pytest.mark.parametrize("requested", ["flash_attention_2", METAL_FLASH, "", "SDPA"])
def test_an_explicit_request_that_is_not_there_is_refused_with_what_is(requested: str) -> None:
    with pytest.raises(ConfigError, match="there is: cpu_paged, sdpa, eager") as caught:
        resolve(requested, "cpu", has_package=installed)
    assert caught.value.field == "attn_implementation"


def test_an_explicit_request_without_its_package_is_refused_never_replaced() -> None:
    with pytest.raises(ConfigError, match="pip install kernels") as caught:
        resolve(METAL_FLASH, "mps", has_package=nothing_installed)
    assert caught.value.field == "attn_implementation"


def test_a_failed_self_check_moves_on_to_the_next_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice = resolve(
            None, "mps", lambda name: "off by 0.3" if name == METAL_FLASH else None, has_package=installed
        )
    assert choice.name == "sdpa"
    assert choice.rejected == ((METAL_FLASH, "off by 0.3"),)
    assert choice.warnings == ()
    assert f"not {METAL_FLASH}: off by 0.3" in caplog.text


def test_an_explicit_request_that_fails_its_self_check_is_refused() -> None:
    with pytest.raises(ConfigError, match="off by"):
        resolve("eager", "cpu", lambda name: "off by 0.3")


def test_no_kernel_that_passes_is_an_error_that_tells_of_each() -> None:
    with pytest.raises(ConfigError, match="sdpa: wrong"):
        resolve(None, "cpu", lambda name: "wrong")


def test_a_kernel_is_added_by_one_line_and_tried_in_its_place() -> None:
    table = (Candidate("ours", ("cpu",)), Candidate("sdpa", ("cpu",)))
    assert resolve(None, "cpu", candidates=table).name == "ours"
    assert (
        resolve(None, CpuDevice(), lambda n: "no" if n == "ours" else None, candidates=table).name == "sdpa"
    )


def test_the_self_check_is_not_run_on_kernels_that_cannot_run() -> None:
    asked: list[str] = []
    resolve(None, "mps", lambda name: asked.append(name), has_package=nothing_installed)
    assert asked == ["sdpa"]


def test_first_passing_stops_at_the_first_that_passes() -> None:
    asked: list[str] = []

    def check(name: str) -> str | None:
        asked.append(name)
        return None if name == "b" else "bad"

    assert first_passing(["a", "b", "c"], check) == ("b", (("a", "bad"),))
    assert asked == ["a", "b"]
    assert first_passing(["a"], check) == (None, (("a", "bad"),))


def test_a_package_counts_only_if_it_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder named kernels on the path is no package."""
    monkeypatch.setitem(sys.modules, "kernels", types.ModuleType("kernels"))
    assert resolve(None, "mps").name == METAL_FLASH
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert resolve(None, "mps").name == "sdpa"
    monkeypatch.delitem(sys.modules, "kernels")
    (tmp_path / "kernels").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve(None, "mps").name == "sdpa"
    monkeypatch.delitem(sys.modules, "kernels")


def test_a_choice_holds_what_was_said() -> None:
    choice = resolve("sdpa", "cpu")
    assert choice == Choice("sdpa", "as asked for", lines=("attention: sdpa, as asked for",))
