"""Descriptions of tensors read in part equal the tensors made whole and then cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shoal.checkpoint.lazy import Computed, Cut, Joined, Lazy, Stacked, Stored, Turned
from shoal.checkpoint.reader import CheckpointReader, Ranges, sliced_shape

GENERATOR = torch.Generator().manual_seed(0)
TENSORS = {name: torch.randn(4, 6, generator=GENERATOR) for name in "abcd"}


@pytest.fixture
def reader(tmp_path: Path) -> CheckpointReader:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return CheckpointReader(tmp_path)


def read(lazy: Lazy, ranges: Ranges) -> torch.Tensor:
    out = torch.full(sliced_shape(lazy.shape, ranges), float("nan"), dtype=lazy.dtype)
    lazy.read_into(ranges, out)
    return out


def cut(whole: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    for dim, kept in ranges.items():
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in kept], dim)
    return whole


def cases(reader: CheckpointReader) -> list[tuple[Lazy, torch.Tensor]]:
    a, b, c, d = (Stored(reader, name) for name in "abcd")
    one = [TENSORS[name] for name in "abcd"]
    gate, up = torch.stack(one[:2]), torch.stack(one[2:])
    return [
        (a, one[0]),
        (Joined([a, b, c], 0), torch.cat(one[:3], 0)),
        (Joined([a, b], 1), torch.cat(one[:2], 1)),
        (Stacked([a, b, c]), torch.stack(one[:3])),
        (Joined([Stacked([a, b]), Stacked([c, d])], 1), torch.cat([gate, up], 1)),
        (Cut(a, 0, 1, 3), one[0][1:3]),
        (Cut(Joined([a, b], 1), 1, 4, 9), torch.cat(one[:2], 1)[:, 4:9]),
        (Turned(a, 0, 1), one[0].T),
        (Turned(Stacked([a, b]), 1, 2), torch.stack(one[:2]).transpose(1, 2)),
        (Computed(lambda: one[0] * 2), one[0] * 2),
    ]


@pytest.mark.parametrize("case", range(10))
def test_any_ranges_of_any_dimension_are_those_of_the_whole(reader: CheckpointReader, case: int) -> None:
    lazy, whole = cases(reader)[case]
    assert lazy.shape == tuple(whole.shape)
    assert torch.equal(read(lazy, {}), whole)
    for dim, size in enumerate(whole.shape):
        for kept in (((0, 1),), ((1, size),), ((size - 1, size), (0, 1)), ()):
            expected = cut(whole, {dim: kept}) if kept else whole.narrow(dim, 0, 0)
            assert torch.equal(read(lazy, {dim: kept}), expected)


def test_only_the_pieces_that_are_kept_are_read(reader: CheckpointReader) -> None:
    experts = Stacked([Stored(reader, name) for name in "abcd"])
    read(experts, {0: ((2, 3),)})
    assert reader.bytes_read == 4 * 6 * 4
    read(Joined([Stored(reader, "a"), Stored(reader, "b")], 0), {0: ((0, 2),)})
    assert reader.bytes_read == 4 * 6 * 4 + 2 * 6 * 4


def test_a_computed_tensor_is_computed_once_for_shape_and_values() -> None:
    calls: list[int] = []

    def compute() -> torch.Tensor:
        calls.append(1)
        return torch.ones(2, 2)

    lazy = Computed(compute)
    assert lazy.shape == (2, 2)
    assert torch.equal(read(lazy, {}), torch.ones(2, 2))
    assert len(calls) == 1
