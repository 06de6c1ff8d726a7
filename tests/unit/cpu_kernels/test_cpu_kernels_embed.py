"""Embedding rows read back from a packed head."""

from __future__ import annotations

import pytest
import torch

from shoal.cpu_kernels.embed import embed
from shoal.cpu_kernels.layout import STORAGES, pack, unpack
from shoal.jit.team import Team


@pytest.mark.parametrize("storage", STORAGES)
def test_each_id_gives_its_row_of_the_unpacked_weight(storage: str, team: Team, pair: Team) -> None:
    packed = pack(torch.randn(100, 77), storage=storage)
    ids = torch.tensor([[0, 15, 16], [99, 50, 50]])
    for threads in (team, pair):
        torch.testing.assert_close(embed(ids, packed, threads), unpack(packed)[ids], atol=1e-6, rtol=0)


def test_rows_are_scaled(team: Team) -> None:
    weight, ids = torch.randn(20, 8), torch.arange(20)
    assert torch.equal(embed(ids, pack(weight), team, scale=8.0), weight * 8.0)


def test_an_id_outside_the_vocabulary_gives_zeros(team: Team) -> None:
    rows = embed(torch.tensor([-1, 17, 20, 3]), pack(torch.ones(17, 8)), team)
    assert rows.any(-1).tolist() == [False, False, False, True]


def test_ids_of_another_kind_are_refused(team: Team) -> None:
    with pytest.raises(TypeError, match="int64"):
        embed(torch.tensor([1], dtype=torch.int32), pack(torch.ones(4, 4)), team)
