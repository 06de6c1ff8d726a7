"""A batch cut in two is the same batch, in halves that take about equally long."""

from __future__ import annotations

import pytest
import torch

from shoal.attention.base import AttentionBatch, DecodeGroup, Prefill
from shoal.fuse.halves import choose_cut, cut_batch

BLOCKS = torch.arange(8)


def batch(singles: int, *prompts: tuple[int, int]) -> AttentionBatch:
    """Sequences with one token that see 3, 4, ... positions; then prompts of (tokens, positions seen)."""
    table = torch.arange(singles)[:, None] + torch.arange(4)
    lengths = torch.arange(singles) + 3
    prefills, start = [], singles
    for tokens, length in prompts:
        prefills.append(Prefill(start, start + tokens, BLOCKS, length))
        start += tokens
    return AttentionBatch(
        torch.arange(start) * 10, DecodeGroup(table, lengths) if singles else None, prefills
    )


def seen(part: AttentionBatch) -> list[tuple[int, int, list[int]]]:
    """Of every row: its slot, the positions it sees, its blocks."""
    slots = part.slots.tolist()
    group = part.decode
    rows = (
        []
        if group is None
        else list(zip(slots, group.lengths.tolist(), group.block_table.tolist(), strict=False))
    )
    rows = rows[: 0 if group is None else group.size]
    for prefill in part.prefills:
        assert prefill.start == len(rows), "rows go on where the sequence before ends"
        count = prefill.stop - prefill.start
        for index in range(count):
            length = prefill.length - count + index + 1
            rows.append((slots[prefill.start + index], length, prefill.block_ids.tolist()))
    assert len(rows) == len(slots)
    return rows


@pytest.mark.parametrize("whole", [batch(7), batch(0, (9, 9)), batch(3, (4, 10), (1, 6), (5, 5))])
def test_every_row_is_in_one_half_and_sees_what_it_saw(whole: AttentionBatch) -> None:
    for row in range(1, len(whole.slots)):
        first, second = cut_batch(whole, row)
        assert len(first.slots) == row
        assert seen(first) + seen(second) == seen(whole)
        for half in (first, second):
            assert half.decode is None or half.decode.size > 0


def test_the_layout_of_layers_that_see_a_window_is_cut_at_the_same_row() -> None:
    whole, apart = batch(3, (4, 10), (5, 5)), batch(3, (4, 10), (5, 5))
    apart.slots = apart.slots + 1
    whole.windowed = apart
    for row in (1, 3, 5, 9):
        first, second = cut_batch(whole, row)
        assert first.windowed is not None and second.windowed is not None
        assert seen(first.windowed) + seen(second.windowed) == seen(apart)
        assert first.windowed.windowed is None and len(first.windowed.slots) == row


def test_rows_that_cost_the_same_are_cut_in_the_middle() -> None:
    group = DecodeGroup(torch.zeros(32, 1, dtype=torch.int64), torch.full((32,), 100))
    assert choose_cut(AttentionBatch(torch.arange(32), group, []), 64) == 16


def test_what_rows_see_counts() -> None:
    """4 rows that see 1,000 positions cost what 8 rows cost that see 11, in a layer 163 wide."""
    lengths = torch.tensor([1000] * 4 + [11] * 8)
    group = DecodeGroup(torch.zeros(12, 1, dtype=torch.int64), lengths)
    assert choose_cut(AttentionBatch(torch.arange(12), group, []), 163) == 4
    whole = batch(0, (1000, 1000))
    assert 500 < choose_cut(whole, 1) < 1000, "later rows of a prompt see more"
