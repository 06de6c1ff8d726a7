"""Bytes by arithmetic against bytes that a sharded model holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.comm.local import LocalComm
from shoal.plan.derive import derive
from shoal.plan.footprint import footprint
from shoal.plan.skeleton import build_on_meta
from shoal.plan.slices import slices
from shoal.shard import shard
from support.planner import FAMILIES, demo, llama


class OneOf(LocalComm):
    """Says it is one of several; nobody calls a collective."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def held_bytes(model: nn.Module) -> int:
    """Bytes of the unique storages of parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tp", [1, 3])
def test_weight_bytes_are_those_of_the_sharded_model(family: str, tp: int) -> None:
    model_class, config = FAMILIES[family]()
    plan = derive(model_class, config, tp)
    wanted = footprint(plan, build_on_meta(model_class, config), 4)
    for rank in range(tp):
        model = model_class(config)
        shard(model, plan, rank, OneOf(rank, tp))
        assert wanted.ranks[rank].weight_bytes == held_bytes(model)


def test_half_precision_halves_parameters_and_leaves_buffers() -> None:
    model_class, config = llama()
    model = build_on_meta(model_class, config)
    plan = derive(model_class, config, 2)
    buffers = sum(buffer.numel() * 4 for buffer in model.buffers())
    full, half = footprint(plan, model, 4).ranks[0], footprint(plan, model, 2).ranks[0]
    assert full.weight_bytes - buffers == 2 * (half.weight_bytes - buffers)


def test_the_demo_models_ranks_are_level_and_their_heads_and_kv_bytes_known() -> None:
    model_class, config = demo()
    model = build_on_meta(model_class, config)
    cost = footprint(derive(model_class, config, 2), model, 4)
    first, second = cost.ranks
    assert max(first.weight_bytes, second.weight_bytes) / min(first.weight_bytes, second.weight_bytes) < 1.01
    assert (first.heads, second.heads) == (6, 3)
    assert (first.kv_heads, second.kv_heads) == (2, 1)
    assert first.kv_bytes_per_token == 30 * 2 * 2 * 64 * 4
    assert (cost.all_reduces, cost.all_gathers) == (61, 1)


def test_coverage_adds_up() -> None:
    model_class, config = llama()
    coverage = footprint(derive(model_class, config, 2), build_on_meta(model_class, config), 4).coverage
    assert coverage.column_row + coverage.gathered + coverage.replicated == pytest.approx(1)
    assert coverage.column_row > 0.5
    assert coverage.replicated < 0.02


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_slices_of_all_ranks_give_back_every_tensor(family: str) -> None:
    """Each index of a split tensor is read by at least one rank, in ascending order."""
    model_class, config = FAMILIES[family]()
    plan = derive(model_class, config, 3)
    model = build_on_meta(model_class, config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    parts = [slices(plan, model, rank) for rank in range(3)]
    for name, first in parts[0].items():
        seen = torch.zeros(shapes[name][first.dim], dtype=torch.bool)
        for part in parts:
            for start, stop in part[name].ranges:
                seen[start:stop] = True
        assert bool(seen.all()), name
