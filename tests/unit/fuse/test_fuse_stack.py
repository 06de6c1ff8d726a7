"""Stacks run layers over pages: the layers' own numbers, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.attention.base import KVShape
from shoal.attention.cpu import CpuPaged
from shoal.comm.base import Comm
from shoal.comm.local import LocalComm
from shoal.comm.simulated import run_ranks
from shoal.fuse.buffers import Buffers
from shoal.fuse.build import LayerDraft, draft_layer
from shoal.fuse.prove import difference, proof_inputs
from shoal.fuse.recipe import Attend
from shoal.fuse.recognise import recognise
from shoal.fuse.stack import Stack
from shoal.fuse.weights import Packer
from shoal.jit.team import Team
from shoal.shard import shard
from support.fusing import fuse, layer_call, planned, ready, zoo_model

LLAMA = "model.layers.0"


def drafted(family: str, team: Team, path: str = LLAMA) -> tuple[LayerDraft, str, Any, Any]:
    layer, call = layer_call(zoo_model(family), path, team)
    recipe = recognise(layer, call)
    draft = draft_layer(recipe, layer, 0, Packer(layer, "float32"), call.hidden.shape[2], True)
    return draft, recipe.output, layer, call


def test_buffers_grow_and_say_that_they_moved() -> None:
    buffers = Buffers()
    buffers.want("x", 4)
    buffers.reserve(1)
    version, room = buffers.version, buffers.num_rows
    buffers.reserve(room)
    assert buffers.version == version
    buffers.want("y", 8)
    buffers.reserve(room + 1)
    assert buffers.version > version
    assert buffers["x"].shape[0] == buffers["y"].shape[0] > room
    with pytest.raises(ValueError, match="x is 4 features wide, not 5"):
        buffers.want("x", 5)


@torch.inference_mode()
def test_a_stack_is_right_again_after_its_buffers_have_moved(team: Team) -> None:
    draft, output, layer, call = drafted("llama", team)
    buffers = Buffers()
    stack = Stack([(draft, output)], CpuPaged(team), LocalComm(), buffers)
    inputs = proof_inputs(layer, call.hidden.shape, torch.Generator().manual_seed(0), LocalComm())
    shape = KVShape(draft.attend.heads, draft.attend.key_width, draft.attend.value_width)
    assert difference(stack, 0, layer, call, shape, inputs) < 2e-5
    buffers.reserve(4 * buffers.num_rows)
    assert difference(stack, 0, layer, call, shape, inputs) < 2e-5


@pytest.mark.parametrize("threads", [2, 3])
def test_several_threads_give_what_one_gives(threads: int) -> None:
    several = Team(threads)
    try:
        fused = fuse(ready(zoo_model("qwen3"), several))
        assert fused.problems == []  # which is proved with these threads
    finally:
        several.close()


@pytest.mark.parametrize("family", ["llama:9q3kv", "gpt-neox", "opt", "phi", "mixtral"])
def test_ranks_that_share_no_memory_prove_equal_with_their_sums_in_between(family: str) -> None:
    """Each rank is a thread with a team and a part of the model of its own."""
    plan = planned(family, 2)

    def rank(comm: Comm) -> tuple[int, list[str], bool]:
        team = Team(1)
        try:
            model = zoo_model(family)
            shard(model, plan, comm.rank, comm)
            fused = fuse(ready(model, team), comm=comm)
            attends = [step for step in _steps(fused) if isinstance(step, Attend)]
            return fused.num_fused, fused.problems, all(step.heads < 4 for step in attends)
        finally:
            team.close()

    for num_fused, problems, is_part in run_ranks(2, rank):
        assert (num_fused, problems) == (2, [])
        assert is_part


def test_a_layer_that_gathers_before_attention_is_left_alone_on_all_ranks() -> None:
    """Its norm of all heads together needs the other ranks' heads."""
    plan = planned("olmo2", 2)

    def rank(comm: Comm) -> list[str]:
        team = Team(1)
        try:
            model = zoo_model("olmo2")
            shard(model, plan, comm.rank, comm)
            return fuse(ready(model, team), comm=comm).problems
        finally:
            team.close()

    for problems in run_ranks(2, rank):
        assert len(problems) == 2 and "gathers its outputs from all ranks" in problems[0]


def _steps(fused: Any) -> list[Any]:
    return [step for chain in fused._chains for one in chain.ready for step in one.recipe.steps]


def test_if_one_rank_cannot_no_rank_does() -> None:
    plan = planned("llama", 2)

    def rank(comm: Comm) -> list[str]:
        own = Team(1)
        try:
            model = zoo_model("llama")
            shard(model, plan, comm.rank, comm)
            if comm.rank == 1:
                model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: None)
            return fuse(ready(model, own), comm=comm).problems
        finally:
            own.close()

    first, second = run_ranks(2, rank)
    assert first == ["model.layers.0: another rank computes something else"]
    assert second == ["model.layers.0: mlp has hooks"]
