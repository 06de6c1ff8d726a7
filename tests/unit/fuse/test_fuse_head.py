"""A packed head gives the head's own logits, and an embedding that shares its weight the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import transformers as T

from shoal.comm.base import Comm
from shoal.comm.local import LocalComm
from shoal.comm.simulated import run_ranks
from shoal.fuse.head import FusedHead, fuse_head
from shoal.fuse.match import is_close
from shoal.jit.team import Team
from shoal.shard import shard
from support.fusing import planned, zoo_model

IDS = torch.arange(3, 12)[None]


def logits(model: T.PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits


def llama(**options: object) -> T.PreTrainedModel:
    torch.manual_seed(0)
    config = T.LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        **options,
    )  # fmt: skip
    return T.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_stay_the_same_and_each_weight_is_held_once(is_tied: bool, team: Team) -> None:
    model = llama(tie_word_embeddings=is_tied)
    expected, weight = logits(model), model.lm_head.weight
    held = weight.nbytes
    fused = fuse_head(model, team, LocalComm(), "float32")
    assert fused.problem == "" and fused.shares_embedding == is_tied
    assert weight.numel() == 0 and fused.num_bytes >= held
    assert is_close(logits(model), expected)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_restored_head_gives_the_very_same_logits(is_tied: bool, team: Team) -> None:
    model = llama(tie_word_embeddings=is_tied)
    expected = logits(model)
    fuse_head(model, team, LocalComm(), "float32").restore()
    assert torch.equal(logits(model), expected)


def test_an_embedding_that_multiplies_is_served_with_its_factor(team: Team) -> None:
    model = zoo_model("gemma3_text")
    expected = logits(model)
    fused = fuse_head(model, team, LocalComm(), "float32")
    assert fused.shares_embedding
    assert is_close(logits(model), expected)


def test_an_embedding_that_does_something_else_keeps_its_weight(team: Team) -> None:
    model = llama(tie_word_embeddings=True)
    own = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: own(ids).clamp(max=0.01)
    expected = logits(model)
    fused = fuse_head(model, team, LocalComm(), "float32")
    assert not fused.shares_embedding and model.lm_head.weight.numel() > 0
    assert is_close(logits(model), expected)


def test_a_bias_and_bfloat16_are_kept(team: Team) -> None:
    model = zoo_model("phi", torch.bfloat16)
    expected = logits(model)
    fused = fuse_head(model, team, LocalComm(), "bfloat16")
    assert fused.problem == "" and logits(model).dtype is torch.bfloat16
    assert torch.allclose(logits(model), expected, atol=0.05, rtol=0.02)


def test_rounded_heads_are_near_the_whole_one(team: Team) -> None:
    model = llama(tie_word_embeddings=True)
    expected = logits(model)
    fuse_head(model, team, LocalComm(), "int8")
    gap = (logits(model) - expected).abs().max() / expected.abs().max()
    assert 0 < gap < 0.05


def test_ids_outside_the_vocabulary_are_refused_as_before(team: Team) -> None:
    model = llama(tie_word_embeddings=True)
    fuse_head(model, team, LocalComm(), "float32")
    for wrong in (101, -1):
        with pytest.raises(IndexError, match="one of the vocabulary's 101"):
            model.model.embed_tokens(torch.tensor([[wrong]]))


def test_a_head_with_hooks_is_left_alone(team: Team) -> None:
    model = llama()
    model.lm_head.register_forward_hook(lambda module, args, out: None)
    assert fuse_head(model, team, LocalComm(), "float32").problem == "no plain linear is its head"


def test_a_head_that_computes_around_its_product_is_left_alone(team: Team) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3

    model = llama()
    model.lm_head.__class__ = Scaled
    before = logits(model)
    assert fuse_head(model, team, LocalComm(), "float32").problem == "no plain linear is its head"
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", ["llama:9q3kv", "gpt2", "gemma3_text"])
def test_parts_of_a_vocabulary_are_gathered_and_looked_up_on_the_rank_that_has_them(family: str) -> None:
    plan, expected = planned(family, 2), logits(zoo_model(family))

    def rank(comm: Comm) -> tuple[FusedHead, torch.Tensor]:
        own = Team(1)
        try:
            model = zoo_model(family)
            shard(model, plan, comm.rank, comm)
            return fuse_head(model, own, comm, "float32"), logits(model)
        finally:
            own.close()

    answers: Sequence[tuple[FusedHead, torch.Tensor]] = run_ranks(2, rank)
    for fused, got in answers:
        assert fused.problem == ""
        assert is_close(got, expected)
