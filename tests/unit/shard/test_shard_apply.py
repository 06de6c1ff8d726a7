"""A plan written by hand, carried out on a whole model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.comm.local import LocalComm
from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import PlanError
from shoal.plan.slices import slices
from shoal.plan.types import Patch, Plan, Range, Split, even_ranges
from shoal.shard import shard
from support.planner import bloom, llama

LAYER = "model.layers.*."


def split(op: str, dim: int, size: int, *parts: Range) -> Split:
    return Split(op, dim, size, tuple((part,) for part in parts))  # type: ignore[arg-type]


PLAN = Plan(
    tp=2,
    model_class="LlamaForCausalLM",
    params={
        f"{LAYER}self_attn.q_proj.weight": split("column", 0, 96, (0, 64), (64, 96)),
        f"{LAYER}self_attn.k_proj.weight": split("column", 0, 48, (0, 32), (32, 48)),
        f"{LAYER}self_attn.v_proj.weight": split("column", 0, 48, (0, 32), (32, 48)),
        f"{LAYER}self_attn.o_proj.weight": split("row", 1, 96, (0, 64), (64, 96)),
        f"{LAYER}mlp.gate_proj.weight": split("column", 0, 160, (0, 70), (70, 160)),
        f"{LAYER}mlp.up_proj.weight": split("column", 0, 160, (0, 70), (70, 160)),
        f"{LAYER}mlp.down_proj.weight": split("row", 1, 160, (0, 70), (70, 160)),
        "model.embed_tokens.weight": Split("vocab", 0, 101, even_ranges(101, 2)),
        "lm_head.weight": Split("gather", 0, 101, even_ranges(101, 2)),
    },
)


def model_of(**changes: object) -> nn.Module:
    model_class, config = llama(**changes)
    return model_class(config).double().eval()


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_every_rank_gives_the_whole_models_logits_under_the_old_names(tied: bool) -> None:
    whole = model_of(tie_word_embeddings=tied)
    ids = torch.randint(0, 101, (2, 7), generator=torch.Generator().manual_seed(0))
    names = [name for name, _ in whole.named_parameters()]

    @torch.no_grad()
    def body(comm: SimulatedComm) -> torch.Tensor:
        model = copy.deepcopy(whole)
        shard(model, PLAN, comm.rank, comm)
        assert [name for name, _ in model.named_parameters()] == names
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
        return model(ids).logits

    for logits in run_ranks(2, body):
        assert logits.shape == (2, 7, 101)
        assert torch.allclose(logits, whole(ids).logits, rtol=1e-10, atol=1e-12)


def test_on_meta_shapes_become_those_of_the_slices() -> None:
    model_class, config = llama()
    for rank in range(2):
        with torch.device("meta"):
            model = model_class(config)
        wanted = slices(PLAN, model, rank)
        full = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        shard(model, PLAN, rank, FakeComm(rank))
        for name, parameter in model.named_parameters():
            shape = list(full[name])
            if name in wanted:
                shape[wanted[name].dim] = wanted[name].length
            assert list(parameter.shape) == shape, name
            assert parameter.is_meta


class FakeComm(LocalComm):
    """Says it is one of two; nobody calls a collective."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_the_full_weights_are_released() -> None:
    model = model_of()
    before = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    shard(model, PLAN, 1, FakeComm(1))
    after = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    assert after < 0.6 * before


def test_a_config_is_copied_before_it_is_patched() -> None:
    model_class, config = bloom()
    model = model_class(config)
    patch = Patch("transformer.h.*.self_attention", "BloomAttention", "config.n_head", 4, (2, 2))
    attention = model.transformer.h[0].self_attention
    attention.config = config
    model.transformer.h[1].self_attention.config = config
    shard(model, Plan(2, "BloomForCausalLM", patches=(patch,)), 0, FakeComm(0))
    assert attention.config.n_head == 2
    assert config.n_head == 4


@pytest.mark.parametrize(
    ("plan", "rank", "message"),
    [
        (PLAN, 2, "rank 2"),
        (PLAN, 1, "the group says"),
        (replace(PLAN, tp=3), 0, "the group says"),
        (replace(PLAN, params={"lm_head.weight": split("gather", 0, 99, (0, 50), (50, 99))}), 0, "99"),
        (replace(PLAN, params={"lm_head.weight": split("vocab", 0, 101, (0, 50), (50, 101))}), 0, "cannot"),
        (replace(PLAN, patches=(Patch("model", "LlamaModel", "x", 1, (1, 1)),)), 0, "no LlamaModel"),
    ],
)
def test_what_does_not_fit_is_refused(plan: Plan, rank: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        shard(model_of(), plan, rank, FakeComm(0))


def test_ties_that_the_plan_breaks_are_refused() -> None:
    params = {
        "lm_head.weight": PLAN.params["lm_head.weight"],
        "model.embed_tokens.weight": Split("replicate"),
    }
    with pytest.raises(PlanError, match="tied"):
        shard(model_of(tie_word_embeddings=True), replace(PLAN, params=params), 0, FakeComm(0))
    other = {**PLAN.params, "model.embed_tokens.weight": split("vocab", 0, 101, (0, 60), (60, 101))}
    with pytest.raises(PlanError, match="tied"):
        shard(model_of(tie_word_embeddings=True), replace(PLAN, params=other), 0, FakeComm(0))


def test_one_rank_changes_nothing() -> None:
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    shard(model, Plan(1, "LlamaForCausalLM"), 0, LocalComm())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
