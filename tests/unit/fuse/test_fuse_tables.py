"""Rotary tables stay where they are from step to step, whatever a model makes them in."""

from __future__ import annotations

import torch

from shoal.fuse.tables import KeptTables, Tables


def pair(rows: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Tables:
    return torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)


def test_they_are_copied_to_the_same_place_and_shared_as_they_were() -> None:
    kept, first, second = KeptTables(), pair(3), pair(3, 4)
    held = kept.keep([first, None, second, first])
    assert held[0] is held[3] and held[1] is None
    for _ in range(2):
        first, second = pair(5), pair(5, 4, torch.bfloat16)
        again = kept.keep([first, None, second, first])
        assert again is held
        for own, given in ((held[0], first), (held[2], second)):
            assert own is not None and own[0].dtype is torch.float32
            assert torch.equal(own[0][:5], given[0].float()) and torch.equal(own[1][:5], given[1].float())


def test_other_layers_that_share_more_rows_or_other_widths_get_another_place() -> None:
    kept, first, second = KeptTables(), pair(2), pair(2)
    shared, wider = [pair(300), None], [pair(300, 16), None]
    lists = [kept.keep(given) for given in ([first, second], [first, first], shared, wider, [None, None])]
    assert len({id(held) for held in lists}) == len(lists)
    assert lists[1][0] is lists[1][1] and lists[0][0] is not lists[0][1]
    assert lists[2][0] is not None and len(lists[2][0][0]) >= 300
