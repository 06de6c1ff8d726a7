"""Kernels are made by name and must compute what the reference computes before they serve."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shoal.attention.base import AttentionBatch, LayerPages, Variant
from shoal.attention.cpu import CpuPaged
from shoal.attention.kernels import KernelMaker, self_check
from shoal.attention.resolve import CANDIDATES, CPU_PAGED, resolve
from shoal.attention.sdpa import paged_eager, paged_sdpa
from shoal.errors import ConfigError
from shoal.jit.team import Team


def test_each_kernel_of_a_cpu_is_made_once() -> None:
    maker = KernelMaker(torch.float32, num_threads=1)
    assert maker.make("sdpa") is paged_sdpa
    assert maker.make("eager") is paged_eager
    assert isinstance(maker.make(CPU_PAGED), CpuPaged)
    assert maker.make(CPU_PAGED) is maker.make(CPU_PAGED)
    with pytest.raises(LookupError):
        maker.make("flash")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_of_a_cpu_passes(dtype: torch.dtype) -> None:
    maker = KernelMaker(dtype, num_threads=2)
    names = [candidate.name for candidate in CANDIDATES if "cpu" in candidate.devices]
    assert [maker.problem(name) for name in names] == [None] * len(names)


def test_a_dtype_that_ours_does_not_compute_goes_to_sdpa_and_the_reason_is_said() -> None:
    maker = KernelMaker(torch.float16, num_threads=1)
    choice = resolve(None, "cpu", maker.problem)
    assert choice.name == "sdpa"
    assert [name for name, _ in choice.rejected] == [CPU_PAGED]
    assert "torch.float16" in choice.rejected[0][1]
    with pytest.raises(ConfigError, match="float16"):
        resolve(CPU_PAGED, "cpu", maker.problem)


def test_a_kernel_without_a_paged_form_is_told_from_a_wrong_one() -> None:
    assert KernelMaker(torch.float32, 1).problem("flash") == "it has no form for paged KV in this build"


def test_the_reference_agrees_with_itself() -> None:
    assert self_check(paged_sdpa, torch.float32) is None
    assert self_check(paged_eager, torch.bfloat16) is None


class _Wrong(CpuPaged):
    """Our kernel with one thing changed."""

    def __init__(self, fault: str) -> None:
        super().__init__(Team(1))
        self._fault = fault

    def write(self, pages: LayerPages, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(pages, keys, values, slots.flip(0) if self._fault == "slots" else slots)

    def __call__(
        self,
        query: torch.Tensor,
        pages: LayerPages,
        batch: AttentionBatch,
        variant: Variant,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._fault == "window":
            variant = variant._replace(window=None)
        if self._fault == "softcap":
            variant = variant._replace(softcap=None)
        if self._fault == "scale":
            variant = variant._replace(scale=variant.scale * 1.01)
        if self._fault == "heads":
            query = query.view(len(query), 2, 3, -1).transpose(1, 2).flatten(1, 2)
        out = super().__call__(query, pages, batch, variant, None if self._fault == "sinks" else sinks)
        if self._fault == "nan":
            out[-1, -1, -1] = float("nan")
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["window", "softcap", "scale", "heads", "sinks", "nan"])
def test_a_kernel_that_computes_something_else_is_found_out(fault: str, dtype: torch.dtype) -> None:
    problem = self_check(_Wrong(fault), dtype)
    assert problem is not None and "differs from the reference" in problem


def test_a_kernel_that_writes_elsewhere_is_found_out() -> None:
    assert "write the pages" in str(self_check(_Wrong("slots"), torch.float32))


def test_numba_is_imported_only_when_a_compiled_kernel_is_made() -> None:
    code = "import sys, shoal.attention.kernels, shoal.worker.rank; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
