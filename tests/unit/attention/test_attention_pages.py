"""KV pages are zero wherever they lie, and what is put off is what no first blocks need."""

from __future__ import annotations

import pytest
import torch

from shoal.attention import pages
from shoal.attention.base import KVShape
from shoal.device.backing import Backing

SHAPES = [KVShape(2, 8, 8), KVShape(1, 16, 4)]


def test_small_pages_are_all_there_at_once() -> None:
    later = Backing()
    made = pages.allocate(SHAPES, 10, 4, torch.float32, torch.device("cpu"), later=later)
    assert later.num_bytes == 0
    assert [layer.keys.shape for layer in made] == [(10, 4, 2, 8), (10, 4, 1, 16)]
    assert [layer.values.shape for layer in made] == [(10, 4, 2, 8), (10, 4, 1, 4)]


def test_of_large_ones_the_first_blocks_are_there_and_the_rest_is_put_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "_FIRST_BYTES", 1 << 16)
    later = Backing()
    made = pages.allocate(SHAPES, 1000, 4, torch.float32, torch.device("cpu"), later=later)
    total = sum(layer.keys.nbytes + layer.values.nbytes for layer in made)
    block_bytes = total // 1000
    assert total - later.num_bytes == pytest.approx(1 << 16, abs=block_bytes)
    assert (total - later.num_bytes) % block_bytes == 0  # the same blocks of every layer
    later.start()
    later.wait()
    assert not any(layer.keys.any() or layer.values.any() for layer in made)


def test_nothing_is_put_off_where_nobody_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_FIRST_BYTES", 1)
    made = pages.allocate(SHAPES, 10, 4, torch.float32, torch.device("cpu"))
    assert not any(layer.keys.any() or layer.values.any() for layer in made)
