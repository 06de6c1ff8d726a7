"""Descriptions of tensors read in part equal the tensors made whole and then cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shoal.checkpoint import lazy as module
from shoal.checkpoint.lazy import Computed, Cut, Joined, Lazy, Permuted, Stacked, Stored, Turned
from shoal.checkpoint.reader import CheckpointReader, Ranges, sliced_shape

GENERATOR = torch.Generator().manual_seed(0)
TENSORS = {name: torch.randn(4, 6, generator=GENERATOR) for name in "abcd"}
ORDER = torch.tensor([4, 2, 0, 5, 3, 1])


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
        (Stacked([a, b, c], 1), torch.stack(one[:3], 1)),
        (Permuted(a, 1, ORDER), one[0][:, ORDER]),
        (Permuted(Stacked([a, b]), 2, ORDER), torch.stack(one[:2])[:, :, ORDER]),
        (Turned(Permuted(a, 1, ORDER), 0, 1), one[0][:, ORDER].T),
        (Computed(lambda is_last: one[0] * 2), one[0] * 2),
    ]


@pytest.mark.parametrize("case", range(14))
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


def test_reordered_indices_are_read_once_each_and_in_pieces(
    reader: CheckpointReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 2 * 4 * 4)  # two columns of four
    permuted = Permuted(Stored(reader, "a"), 1, ORDER)
    assert torch.equal(read(permuted, {1: ((0, 3), (4, 6))}), TENSORS["a"][:, [4, 2, 0, 3, 1]])
    assert reader.bytes_read == 5 * 4 * 4


def test_a_computed_tensor_is_told_when_its_values_are_taken() -> None:
    calls: list[bool] = []

    def compute(is_last: bool) -> torch.Tensor:
        calls.append(is_last)
        return torch.ones(2, 2)

    lazy = Computed(compute)
    assert lazy.shape == (2, 2)
    assert torch.equal(read(lazy, {}), torch.ones(2, 2))
    assert calls[0] is False
    assert calls[-1] is True
    assert calls.count(True) == 1
