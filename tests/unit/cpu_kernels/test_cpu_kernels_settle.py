"""Packed weights moved together: the same numbers at the same descriptor, and nothing left behind."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from shoal.cpu_kernels.layout import STORAGES, pack, unpack
from shoal.cpu_kernels.linear import PackedLinear
from shoal.cpu_kernels.settle import settle
from shoal.device import huge
from shoal.jit.team import Team


@pytest.mark.parametrize("storage", STORAGES)
def test_a_moved_weight_computes_the_same_at_the_same_address(storage: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [
        pack(torch.randn(n, k, generator=generator), torch.randn(n, generator=generator), storage)
        for n, k in ((40, 33), (7, 64))
    ]
    layers = [PackedLinear(weight, Team(1)) for weight in weights]
    inputs = [torch.randn(3, weight.depth, generator=generator) for weight in weights]
    before = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    rows, addresses = [unpack(weight) for weight in weights], [weight.address for weight in weights]
    places = [tensor.data_ptr() for weight in weights for tensor in weight.tensors]
    settle(weights)
    assert [weight.address for weight in weights] == addresses
    assert not set(places) & {tensor.data_ptr() for weight in weights for tensor in weight.tensors}
    for layer, x, y, weight, whole in zip(layers, inputs, before, weights, rows, strict=True):
        assert torch.equal(layer(x), y) and torch.equal(unpack(weight), whole)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in weight.tensors)


def test_the_region_goes_with_the_last_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __new__(cls, *args: int) -> Watched:
            region = super().__new__(cls, *args)
            regions.append(weakref.ref(region))
            return region

    monkeypatch.setattr(huge.mmap, "mmap", Watched)
    first, second = pack(torch.randn(16, 16)), pack(torch.randn(16, 16))
    settle([first, second])
    del first
    gc.collect()
    assert regions[0]() is not None and unpack(second).shape == (16, 16)
    del second
    gc.collect()
    assert regions[0]() is None


def test_nothing_to_move_is_fine() -> None:
    settle([])
