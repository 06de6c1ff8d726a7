"""What is in no region: gathered, summed or left whole, with the reason."""

from __future__ import annotations

import pytest
from torch import nn

from shoal.plan.derive import derive
from shoal.plan.fallback import fallback_split
from support.planner import gpt2, llama, opt
from support.zoo.seq2seq import SEQ2SEQ


def test_what_holds_next_to_nothing_stays_whole_without_a_collective() -> None:
    """A position table of 8 rows in a model of a few hundred thousand parameters."""
    model_class, config = gpt2()
    config.n_positions = 16
    split = derive(model_class, config, 2).params["transformer.wpe.weight"]
    assert split.op == "replicate"
    assert "small" in split.reason


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_cut_alike_so_that_they_can_be_one_tensor(tied: bool) -> None:
    plan = derive(*llama(tie_word_embeddings=tied), 3)
    embedding, head = plan.params["model.embed_tokens.weight"], plan.params["lm_head.weight"]
    assert (embedding.op, head.op) == ("vocab", "gather")
    assert (embedding.dim, embedding.ranges) == (head.dim, head.ranges)
    assert embedding.sizes == (33, 34, 34)


def test_projections_tied_to_the_embedding_are_not_split_with_it() -> None:
    """OPT with a narrow embedding: its projection feeds the tied head, which must stay like the table."""
    model_class, config = opt()
    config.word_embed_proj_dim = 32
    plan = derive(model_class, config, 2)
    assert plan.params["lm_head.weight"].op == "gather"
    assert plan.params["model.decoder.embed_tokens.weight"].op == "vocab"


def test_fewer_features_than_ranks_are_not_split() -> None:
    assert fallback_split(nn.Linear(5, 3), 4, "").op == "replicate"
    assert fallback_split(nn.Embedding(3, 5), 4, "").op == "replicate"


def test_a_table_that_grows_with_the_longest_input_stays_whole() -> None:
    """FSMT makes its positions anew where an input is longer than the table has rows."""
    model_class, config = SEQ2SEQ["fsmt"].load()
    plan = derive(model_class, config, 2)
    split = plan.params["model.encoder.embed_positions.weight"]
    assert (split.op, "makes it anew" in split.reason) == ("replicate", True)
    assert plan.params["model.encoder.embed_tokens.weight"].op == "vocab"
