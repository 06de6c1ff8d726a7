"""How an encoder-decoder is served is found by trying, and what is served equals the model called plainly."""

from __future__ import annotations

import pytest
import torch

from shoal.attention.base import KVShape
from shoal.attention.cross_cache import cross_pages
from shoal.errors import UnsupportedError
from shoal.model.choose_seq2seq import serve_seq2seq
from shoal.model.seq2seq import EncoderDecoder, Manner, unchanged
from support.zoo.build import build
from support.zoo.catalogue import family_of
from support.zoo.seq2seq import SEQ2SEQ

MANNERS = {
    "t5": Manner(),
    "longt5:tglobal": Manner(),
    "marian": Manner(mixes_lengths=False),  # positions come from the length of the cache
    "led": Manner(mixes_lengths=False),
    "fsmt": Manner(mixes_lengths=False, takes_chunks=False),  # no causal mask with a cache
    "prophetnet": Manner(mixes_lengths=False, takes_chunks=False),  # logits of several at once are others
    "bigbird_pegasus:sparse": Manner(mixes_lengths=False, mixes_inputs=False),  # padding moves its blocks
}


@pytest.mark.parametrize("family", MANNERS)
def test_the_manner_is_what_the_model_allows(family: str) -> None:
    module = build(family_of(family), "eager", torch.float32)
    with torch.inference_mode():
        chosen = serve_seq2seq(module, torch.device("cpu"))
    assert isinstance(chosen.model, EncoderDecoder)
    assert chosen.model.manner == MANNERS[family]
    assert chosen.notes[-1].startswith("served the seq2seq way")
    assert any(note.startswith("only token by token") for note in chosen.notes) == (family == "prophetnet")
    assert len(chosen.model.kv_shapes) == 2  # cross-attention lives in the layers' own pages


def test_cross_attention_of_another_shape_has_pages_of_its_own() -> None:
    own = [KVShape(2, 8, 8), KVShape(2, 8, 8), KVShape(1, 8, 8)]
    cross = [KVShape(2, 8, 8), KVShape(4, 8, 8), KVShape(1, 8, 4)]
    assert cross_pages(own, cross) == [0, 3, 4]


def test_what_is_not_finite_is_refused() -> None:
    module = build(SEQ2SEQ["t5"], "eager", torch.float32)
    module.lm_head.weight[0] = torch.nan
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="not finite"):
        serve_seq2seq(module, torch.device("cpu"))


def test_a_short_input_does_not_change_how_a_long_one_is_encoded() -> None:
    module = build(SEQ2SEQ["bigbird_pegasus:sparse"], "eager", torch.float32)
    encoder = module.get_encoder()
    long, short = torch.arange(3, 43)[None], torch.arange(3, 9)[None]
    with torch.inference_mode():
        before = encoder(input_ids=long, attention_mask=torch.ones_like(long)).last_hidden_state
        with unchanged(encoder):
            encoder(input_ids=short, attention_mask=torch.ones_like(short))
        after = encoder(input_ids=long, attention_mask=torch.ones_like(long)).last_hidden_state
    assert torch.equal(before, after)
